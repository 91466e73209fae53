//! The command as a function, as the Python package calls it.

use std::ffi::OsString;

use tenfold_cli::Program;

#[test]
fn ranks_are_started_by_the_program_that_the_caller_names() {
    let folder = tempfile::tempdir().unwrap();
    let started = folder.path().join("started");
    // A stand-in for `python -m tenfold`: it leaves a trace, and runs `tenfold` with the added arguments.
    let script = r#"echo "$2" >> "$0" && exec "$@""#;
    let words = ["-c".into(), script.into(), started.clone().into(), env!("CARGO_BIN_EXE_tenfold").into()];
    let code = tenfold_cli::main(
        ["demo", "--workers", "2", "--steps", "5", "--operations", "5"].map(OsString::from),
        Program::new("sh", words),
    );
    assert_eq!(code, 0);
    assert_eq!(std::fs::read_to_string(started).unwrap(), "demo-worker\ndemo-worker\n");
}
