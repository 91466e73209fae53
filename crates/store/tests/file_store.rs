//! The file store as its users see it: bytes on disk, several objects, threads and processes, and files that
//! are damaged, full, removed, or owned by another user.

#![expect(clippy::disallowed_methods, reason = "a test measures that a failure is reported quickly")]
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise, in its helpers too")]

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::FlockOperation;
use tempfile::TempDir;
use tenfold_store::{ErrorKind, FileStore, FileStoreOptions, Store, StoreExt, Value};

fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    (folder, path)
}

fn open(path: &Path) -> FileStore {
    FileStore::open(path, None).unwrap()
}

fn record(key: &str, value: &str) -> Vec<u8> {
    let (key_length, value_length) = (key.len() as u32, value.len() as u32);
    [&key_length.to_le_bytes(), key.as_bytes(), &value_length.to_le_bytes(), value.as_bytes()].concat()
}

fn log(records: &[(&str, &str)]) -> Vec<u8> {
    records.iter().flat_map(|(key, value)| record(key, value)).collect()
}

fn names(mut keys: Vec<Value>) -> Vec<String> {
    keys.sort();
    keys.iter().map(|key| String::from_utf8_lossy(key).into_owned()).collect()
}

/// Far less than any timeout here, and far more than a call that does not wait takes, even on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(20);

/// The kind and text of the error that opening returns, which must be immediate.
fn refusal(path: &Path, world_size: Option<usize>) -> (ErrorKind, String) {
    let start = Instant::now();
    let error = FileStore::open(path, world_size).unwrap_err();
    assert!(start.elapsed() < AT_ONCE, "took {:?}", start.elapsed());
    (error.kind(), error.to_string())
}

// ── the format ─────────────────────────────────────────────────────────────────────────────────────────────

/// In /tmp another user can create the file first, and so choose what all ranks read.
#[test]
fn a_file_of_another_user_in_a_shared_folder_is_refused() {
    use std::os::unix::fs::PermissionsExt as _;
    const NOBODY: u32 = 65534;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rendezvous");
    std::fs::write(&path, "").unwrap();
    if std::os::unix::fs::chown(&path, Some(NOBODY), None).is_err() {
        return; // only root can give a file away
    }
    let set_mode =
        |mode| std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(mode)).unwrap();
    set_mode(0o1777);
    let error = FileStore::open(&path, Some(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Argument);
    assert!(
        error.to_string().contains("the file belongs to user 65534, this process runs as user 0"),
        "{error}"
    );
    // The owner of this folder has chosen who may create files in it.
    set_mode(0o770);
    drop(FileStore::open(&path, Some(1)).unwrap());
    assert!(!path.exists());
}

#[test]
fn a_fresh_file_holds_the_bytes_that_pytorch_writes() {
    let (_folder, path) = folder();
    let _store = open(&path);
    assert_eq!(fs::read(&path).unwrap(), b"\x09\0\0\0refcount/\x01\0\0\x001");
}

#[test]
fn each_operation_adds_the_records_that_pytorch_would() {
    let (_folder, path) = folder();
    let store = open(&path);
    let mut length = fs::read(&path).unwrap().len();
    let mut added = |what: &str, records: &[(&str, &str)]| {
        let bytes = fs::read(&path).unwrap();
        assert_eq!(
            bytes[length..].escape_ascii().to_string(),
            log(records).escape_ascii().to_string(),
            "{what}"
        );
        length = bytes.len();
    };
    store.set("k", "v").unwrap();
    added("set", &[("/k", "v")]);
    store.set("", "").unwrap();
    added("set of nothing", &[("/", "")]);
    assert_eq!(store.add("n", 5).unwrap(), 5);
    assert_eq!(store.add("n", -7).unwrap(), -2);
    added("add", &[("/n", "5"), ("/n", "-2")]);
    assert_eq!(&*store.compare_set("k", "v", "w").unwrap(), b"w");
    added("compare_set that matches", &[("/k", "w")]);
    assert_eq!(&*store.compare_set("k", "v", "x").unwrap(), b"w");
    assert_eq!(&*store.compare_set("none", "v", "x").unwrap(), b"v");
    added("compare_set that does not", &[]);
    assert_eq!(&*store.compare_set("none", "", "x").unwrap(), b"x");
    added("compare_set of a new key", &[("/none", "x")]);
    store.append("k", "!").unwrap();
    store.append("new", "!").unwrap();
    added("append", &[("/k", "w!"), ("/new", "!")]);
    store.multi_set(&["a", "b"], &["1", "2"]).unwrap();
    added("multi_set", &[("/a", "1"), ("/b", "2")]);
    assert!(store.delete_key("a").unwrap());
    assert!(!store.delete_key("a").unwrap());
    added("delete_key", &[("-/a", "")]);
    assert_eq!(&*store.get("k").unwrap(), b"w!");
    assert_eq!(store.multi_get(&["b", "n"]).unwrap(), [Value::from("2"), Value::from("-2")]);
    assert!(!store.check(&["a", "b"]).unwrap());
    added("reading", &[]);
    drop(store);
    added("leaving", &[("cleanup/", "1"), ("refcount/", "0")]);
}

#[test]
fn what_pytorch_wrote_is_read() {
    let (_folder, path) = folder();
    fs::write(&path, log(&[("refcount/", "1"), ("/a", "1"), ("/b", "2"), ("-/b", ""), ("/a", "3")])).unwrap();
    let store = open(&path);
    assert_eq!(&*store.get("a").unwrap(), b"3");
    assert_eq!(names(store.list_keys().unwrap()), ["a"]);
    assert!(fs::read(&path).unwrap().ends_with(&record("refcount/", "2")));
}

#[test]
fn keys_are_listed_by_their_names_and_counted_as_pytorch_counts() {
    let (_folder, path) = folder();
    let store = open(&path);
    assert_eq!(store.num_keys().unwrap(), 1); // refcount/
    store.set("refcount/", "mine").unwrap();
    store.set("-/odd", "name").unwrap();
    drop(open(&path));
    assert_eq!(store.num_keys().unwrap(), 4); // and cleanup/
    assert_eq!(names(store.list_keys().unwrap()), ["-/odd", "refcount/"]);
    assert!(store.delete_key("-/odd").unwrap());
    assert_eq!(store.num_keys().unwrap(), 3);
}

#[test]
fn adding_to_a_value_that_is_not_a_number_is_refused_and_changes_nothing() {
    let (_folder, path) = folder();
    let store = open(&path);
    store.multi_set(&["word", "empty"], &["blue", ""]).unwrap();
    let before = fs::read(&path).unwrap();
    for key in ["word", "empty"] {
        assert_eq!(store.add(key, 1).unwrap_err().kind(), ErrorKind::NotANumber);
    }
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[test]
fn there_are_no_queues_but_there_is_a_barrier() {
    let (_folder, path) = folder();
    let store = open(&path);
    assert_eq!(store.queue_push("q", "x").unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(store.queue_len("q").unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(!store.has_extended_api());
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| open(&path).barrier("b", 3).unwrap());
        }
    });
    assert_eq!(&*store.get("b/num_members").unwrap(), b"3");
}

// ── several objects, threads and processes ─────────────────────────────────────────────────────────────────

const ADDS: i64 = 200;

fn add_many(store: &FileStore) {
    for _ in 0..ADDS {
        store.add("n", 1).unwrap();
    }
}

#[test]
fn objects_and_threads_that_add_at_once_lose_nothing() {
    let (_folder, path) = folder();
    let shared = open(&path);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| add_many(&shared));
            scope.spawn(|| {
                let own = open(&path);
                add_many(&own);
                own.append("log", "x").unwrap();
            });
        }
    });
    assert_eq!(shared.add("n", 0).unwrap(), 4 * ADDS);
    assert_eq!(&*shared.get("log").unwrap(), b"xx");
}

const CHILD_PATH: &str = "TENFOLD_TEST_FILE_STORE";

/// Not a test itself: what the processes of the next one do.
#[test]
fn a_child_process_adds() {
    let Ok(path) = std::env::var(CHILD_PATH) else { return };
    let store = FileStore::open(path, Some(3)).unwrap();
    store.barrier("start", 3).unwrap();
    add_many(&store);
    store.barrier("end", 3).unwrap();
    assert_eq!(store.add("n", 0).unwrap(), 3 * ADDS);
}

#[test]
fn processes_that_add_at_once_lose_nothing_and_the_last_one_removes_the_file() {
    let (_folder, path) = folder();
    let child = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "a_child_process_adds"]).env(CHILD_PATH, &path).spawn().unwrap()
    };
    let children: Vec<_> = (0..3).map(|_| child()).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    assert!(!path.exists());
}

#[test]
fn a_wait_is_woken_by_another_object() {
    let (_folder, path) = folder();
    let store = open(&path);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let other = open(&path);
            other.set("waiting", "").unwrap();
            (other.get("late").unwrap(), other)
        });
        store.wait(&["waiting"]).unwrap();
        store.set("late", "now").unwrap();
        assert_eq!(&*waiter.join().unwrap().0, b"now");
    });
}

#[test]
fn one_object_can_wait_in_one_thread_and_write_in_another() {
    let (_folder, path) = folder();
    let store = open(&path);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| store.wait(&["a", "b"]));
        store.set("a", "").unwrap();
        store.set("b", "").unwrap();
        waiter.join().unwrap().unwrap();
    });
}

#[test]
fn a_wait_ends_at_its_deadline_and_not_before() {
    let (_folder, path) = folder();
    let store = open(&path);
    for limit in [Duration::ZERO, Duration::from_millis(120)] {
        let start = Instant::now();
        let error = store.wait_for(&["never"], limit).unwrap_err();
        let took = start.elapsed();
        assert!(error.is_timeout());
        assert!(took >= limit && took < limit + AT_ONCE, "{took:?} of {limit:?}");
    }
    assert!(store.set_timeout(Duration::ZERO));
    assert!(store.get("never").unwrap_err().is_timeout());
    store.set("k", "v").unwrap();
    assert_eq!(&*store.get("k").unwrap(), b"v");
}

#[test]
fn a_held_lock_is_waited_for_until_the_deadline() {
    let (_folder, path) = folder();
    let store = open(&path);
    store.set("k", "v").unwrap();
    let holder = File::open(&path).unwrap();
    rustix::fs::flock(&holder, FlockOperation::LockExclusive).unwrap();
    let limit = Duration::from_millis(200);
    store.set_timeout(limit);
    let start = Instant::now();
    let error = store.set("k", "w").unwrap_err();
    let took = start.elapsed();
    assert!(took >= limit && took < limit + AT_ONCE, "{took:?}");
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.message().starts_with("another process held the file's lock for "), "{error}");
    // Nothing new, so no lock is needed.
    assert_eq!(&*store.get("k").unwrap(), b"v");
    drop(holder);
    store.set("k", "w").unwrap();
}

// ── damage ─────────────────────────────────────────────────────────────────────────────────────────────────

/// Left by a process that was killed while writing: the lock shows that no process is writing it now.
#[test]
fn half_a_record_is_skipped_by_readers_and_cut_off_by_the_next_writer() {
    let (_folder, path) = folder();
    let torn = record("/key", "value");
    for cut in 1..torn.len() {
        let earlier = FileStore::open(&path, Some(2)).unwrap();
        earlier.set("safe", "1").unwrap();
        let whole = fs::read(&path).unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(&torn[..cut]).unwrap();

        assert_eq!(&*earlier.get("safe").unwrap(), b"1");
        assert_eq!(names(earlier.list_keys().unwrap()), ["safe"]);
        assert!(!earlier.check(&["key"]).unwrap());
        assert_eq!(fs::read(&path).unwrap().len(), whole.len() + cut, "readers change nothing");

        earlier.set("key", "again").unwrap();
        assert_eq!(fs::read(&path).unwrap(), [whole, record("/key", "again")].concat());
        OpenOptions::new().append(true).open(&path).unwrap().write_all(&torn[..cut]).unwrap();
        let newcomer = FileStore::open(&path, Some(2)).unwrap();
        assert_eq!(&*newcomer.get("key").unwrap(), b"again");
        earlier.set("safe", "2").unwrap();
        assert_eq!(&*newcomer.get("safe").unwrap(), b"2");
        drop((earlier, newcomer));
        assert!(!path.exists(), "the last of two ranks removes it");
    }
}

/// Bytes that do not look like the beginning of a record were not left by a store.
#[test]
fn a_damaged_end_that_no_store_left_is_an_error_for_all_ranks() {
    let (_folder, path) = folder();
    for tail in [&b"Chapter 1"[..], b"\x05\0\0\0key", &[0; 7], &[0xff; 9]] {
        let earlier = FileStore::open(&path, Some(1)).unwrap();
        earlier.set("safe", "1").unwrap();
        let end = fs::metadata(&path).unwrap().len();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(tail).unwrap();
        let damaged = fs::read(&path).unwrap();

        let (kind, text) = refusal(&path, None);
        assert_eq!(kind, ErrorKind::Corrupt);
        assert!(text.starts_with(&format!("store open at file {} failed", path.display())), "{text}");
        assert!(text.contains(&format!(": the file is damaged at offset {end}: ")), "{text}");

        let start = Instant::now();
        for error in [
            earlier.get("safe").unwrap_err(),
            earlier.set("safe", "2").unwrap_err(),
            earlier.wait_for(&["key"], Duration::from_secs(60)).unwrap_err(),
            earlier.list_keys().unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert!(error.hint().unwrap().contains("another program wrote to it"), "{error}");
        }
        drop(earlier);
        assert!(start.elapsed() < AT_ONCE);
        assert_eq!(fs::read(&path).unwrap(), damaged, "nothing is repaired");
        fs::remove_file(&path).unwrap();
    }
}

const WRITER: &str = "FILE_STORE_WRITER";

#[test]
#[ignore = "a process that is killed while it writes, started by a test"]
fn writer_entry() {
    let Ok(path) = std::env::var(WRITER) else { return };
    let store = open(Path::new(&path));
    let so_far = fs::metadata(&path).unwrap().len();
    let limit = rustix::process::Rlimit { current: Some(so_far + 100), maximum: None };
    rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
    let _ = store.set("long", "v".repeat(100_000)); // a hundred bytes are written, and the kernel kills it
    unreachable!("the process is killed in the middle of the write");
}

#[test]
fn the_other_ranks_go_on_when_one_is_killed_in_the_middle_of_a_write() {
    use std::os::unix::process::ExitStatusExt as _;
    let (_folder, path) = folder();
    let store = open(&path);
    store.set("before", "1").unwrap();
    let whole = fs::metadata(&path).unwrap().len();
    let mut writer = Command::new(std::env::current_exe().unwrap());
    writer.args(["--exact", "writer_entry", "--ignored", "--test-threads=1"]).env(WRITER, &path);
    let output = writer.output().unwrap();
    assert_eq!(output.status.signal(), Some(rustix::process::Signal::XFSZ.as_raw()), "{output:?}");
    assert!(fs::metadata(&path).unwrap().len() > whole + 100, "a part of the record is there");
    assert_eq!(&*store.get("before").unwrap(), b"1");
    store.set("after", "2").unwrap();
    let newcomer = open(&path);
    assert_eq!(names(newcomer.list_keys().unwrap()), ["after", "before"]);
}

#[test]
fn files_of_another_kind_are_refused_and_left_unchanged() {
    let (_folder, path) = folder();
    let thesis = "Chapter 1\n\nIt was a dark and stormy night.\n".repeat(1000).into_bytes();
    for content in [thesis, vec![0xff; 4096], vec![0; 4096], b"x".to_vec(), log(&[("key", "value")])] {
        fs::write(&path, &content).unwrap();
        let (kind, text) = refusal(&path, Some(2));
        assert_eq!(kind, ErrorKind::Corrupt);
        assert!(text.contains("it was left unchanged"), "{text}");
        assert_eq!(fs::read(&path).unwrap(), content);
    }
}

#[test]
fn an_empty_file_is_a_fresh_store() {
    let (_folder, path) = folder();
    File::create(&path).unwrap();
    open(&path).set("k", "v").unwrap();
}

#[test]
fn a_file_that_shrank_is_an_error() {
    let (_folder, path) = folder();
    let store = open(&path);
    store.set("k", "v").unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(18).unwrap();
    let error = store.get("k").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert_eq!(error.message(), "the file shrank from 29 to 18 bytes");
}

#[test]
fn a_removed_file_is_not_recreated_and_not_waited_for_beyond_the_deadline() {
    let (_folder, path) = folder();
    let store = open(&path);
    store.set("k", "v").unwrap();
    fs::remove_file(&path).unwrap();
    let limit = Duration::from_millis(100);
    store.set_timeout(limit);
    let removed = "the file was removed after this store was opened";
    let error = store.set("k", "w").unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Lost, removed));
    assert!(store.try_clone().is_err());
    let start = Instant::now();
    let error = store.get("k").unwrap_err();
    assert!(start.elapsed() >= limit);
    assert_eq!((error.kind(), error.message()), (ErrorKind::Lost, removed));
    assert!(!path.exists());

    // Another store at the same path is not ours, even on file systems that reuse inode numbers immediately.
    let other = open(&path);
    let replaced = "the file was replaced by another after this store was opened";
    for error in [store.set("k", "w").unwrap_err(), store.get("k").unwrap_err()] {
        assert_eq!((error.kind(), error.message()), (ErrorKind::Lost, replaced));
    }
    drop(store);
    assert_eq!(fs::read(&path).unwrap(), record("refcount/", "1"), "a stranger does not count itself out");
    drop(other);
}

#[test]
fn an_impossible_path_is_an_immediate_error() {
    let (folder, path) = folder();
    let (kind, text) = refusal(&path.join("under/nothing"), None);
    assert_eq!(kind, ErrorKind::Io);
    assert!(text.contains("create its folder"), "{text}");
    let (kind, text) = refusal(folder.path(), None);
    assert_eq!(kind, ErrorKind::Io);
    assert!(text.contains("name a file in that folder"), "{text}");
    assert_eq!(refusal(Path::new("/dev/null"), None).0, ErrorKind::Argument);
    // Not even root may create files there.
    assert_eq!(refusal(Path::new("/proc/tenfold"), None).0, ErrorKind::Io);
}

// ── a full disk ────────────────────────────────────────────────────────────────────────────────────────────

/// A file system of 64 kB that is unmounted after the test.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let options = ["-t", "tmpfs", "-o", "size=64k", "none"];
        match Command::new("mount").args(options).arg(folder.path()).output() {
            Ok(output) if output.status.success() => Some(SmallDisk(folder)),
            other => {
                eprintln!("skipped: a small file system cannot be mounted here: {other:?}");
                None
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_is_an_error_that_loses_and_tears_nothing() {
    let Some(disk) = SmallDisk::mount() else { return };
    let path = disk.0.path().join("store");
    let (store, peer) = (open(&path), open(&path));
    let value = "v".repeat(999); // no multiple fits exactly, so the last record is written in part
    let mut stored = 0;
    let error = loop {
        match store.set(format!("k{stored}"), &value) {
            Ok(()) => stored += 1,
            Err(error) => break error,
        }
        assert!(stored < 100, "64 kB hold fewer");
    };
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains("No space left on device"), "{error}");
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    assert!(error.hint().unwrap().contains("free some disk space"), "{error}");
    assert!(stored > 50);
    let length = fs::metadata(&path).unwrap().len();
    assert_eq!(store.multi_set(&["big", "bigger"], &[&value, &value]).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(fs::metadata(&path).unwrap().len(), length, "nothing torn remains");
    for reader in [&store, &peer, &FileStore::open(&path, None).unwrap()] {
        for index in 0..stored {
            assert_eq!(&*reader.get(format!("k{index}")).unwrap(), value.as_bytes());
        }
        assert!(!reader.check(&["big"]).unwrap());
    }
    // A short record still fits, and a peer sees it.
    store.set("s", "v").unwrap();
    assert_eq!(&*peer.get("s").unwrap(), b"v");
}

// ── life ───────────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn the_last_of_all_ranks_removes_the_file() {
    let (_folder, path) = folder();
    let first = FileStore::open(&path, Some(2)).unwrap();
    drop(first);
    assert!(path.exists(), "the second rank has not joined yet");
    let second = FileStore::open(&path, Some(2)).unwrap();
    let clone = second.try_clone().unwrap();
    drop(second);
    assert!(path.exists(), "a clone is still open");
    clone.set("k", "v").unwrap();
    drop(clone);
    assert!(!path.exists());
}

#[test]
fn ranks_that_join_while_the_last_one_leaves_find_a_file_that_stays() {
    let (_folder, path) = folder();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..100 {
                    let store = FileStore::open(&path, Some(1)).unwrap();
                    store.set("round", round.to_string()).unwrap();
                    store.get("round").unwrap();
                }
            });
        }
    });
    assert!(!path.exists());
}

#[test]
fn without_a_world_size_the_file_stays() {
    let (_folder, path) = folder();
    open(&path).set("k", "v").unwrap();
    let expected = log(&[("refcount/", "1"), ("/k", "v"), ("cleanup/", "1"), ("refcount/", "0")]);
    assert_eq!(fs::read(&path).unwrap(), expected);
    assert_eq!(&*open(&path).get("k").unwrap(), b"v");
}

#[test]
fn a_clone_sees_what_the_original_writes_and_outlives_it() {
    let (_folder, path) = folder();
    let store = open(&path);
    store.set("before", "1").unwrap();
    let clone = store.try_clone().unwrap();
    store.set("after", "2").unwrap();
    drop(store);
    assert_eq!(&*clone.get("before").unwrap(), b"1");
    assert_eq!(&*clone.get("after").unwrap(), b"2");
    assert_eq!(clone.name(), format!("file {}", path.display()));
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_file_from_before_this_process_is_left_over_from_an_earlier_run() {
    let (_folder, path) = folder();
    let stale = log(&[("refcount/", "2"), ("/a", "1"), ("/b", "2")]);
    fs::write(&path, &stale).unwrap();
    let grow_old = || {
        let an_hour_ago = SystemTime::now() - Duration::from_secs(3600);
        OpenOptions::new().write(true).open(&path).unwrap().set_modified(an_hour_ago).unwrap();
    };
    grow_old();
    let error = FileStore::open(&path, Some(2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let (_, ago) = error.message().rsplit_once("written ").unwrap();
    let ago = ago.trim_end_matches(" s ago");
    assert!((3600.0..3700.0).contains(&ago.parse::<f64>().unwrap()), "{error}");
    assert_eq!(
        error.message(),
        format!("left over from an earlier run: 2 of 2 ranks had joined, 2 keys, last written {ago} s ago")
    );
    let hint = "remove it or use another path; if it belongs to this run, open it with `accept_stale`";
    assert_eq!(error.hint(), Some(hint));
    assert_eq!(fs::read(&path).unwrap(), stale);

    drop(
        FileStore::open(&path, Some(3))
            .expect("one rank has not joined yet, however long ago the others did"),
    );
    drop(FileStore::open(&path, Some(2)).expect("written a moment ago: clones count too"));
    grow_old();
    drop(FileStore::open(&path, None).expect("without a world size it cannot be detected"));
    grow_old();
    let options = FileStoreOptions { world_size: Some(2), accept_stale: true, ..FileStoreOptions::default() };
    FileStore::open_with(&path, options).unwrap();
}
