//! A process that may not make large files: shared memory is refused with an error, and the kernel does not kill the process.

#![expect(clippy::unwrap_used, reason = "a test")]

use std::io::ErrorKind;
use std::process::Command;

use tenfold_memory::{Buffer, DType, Segment};

const CHILD: &str = "TENFOLD_TEST_CHILD";

/// What the process with the limit does.
fn within_limit() {
    let error = Segment::new(64 << 30).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::FileTooLarge);
    let message = error.to_string();
    assert!(message.starts_with("68719476736 bytes of shared memory exceed the limit of "), "{message}");
    assert!(message.ends_with(" bytes for files (RLIMIT_FSIZE); raise it with `ulimit -f`"), "{message}");
    assert_eq!(Buffer::in_file(DType::F32, 1 << 28).unwrap_err().kind(), ErrorKind::FileTooLarge);
    assert!(Segment::new(1 << 16).is_ok(), "what the limit allows is there");
}

#[test]
fn a_limit_of_the_length_of_files_is_an_error_and_not_a_signal() {
    if std::env::var_os(CHILD).is_some() {
        return within_limit();
    }
    let test = "a_limit_of_the_length_of_files_is_an_error_and_not_a_signal";
    let child = Command::new("sh")
        .args(["-c", r#"ulimit -f 1024 && exec "$0" "$@""#])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{}: {said}", child.status);
    assert!(String::from_utf8_lossy(&child.stdout).contains("1 passed"));
}
