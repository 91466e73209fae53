//! A store in a file that every rank can see, byte for byte c10d's `FileStore`.
//!
//! The file is a log that only grows: `u32 LE key length, key, u32 LE value length, value`, again and again; the
//! last record of a key wins. User keys are written as `/key`, a deletion as `-/key`, and two counters of the
//! store's own say how many objects there are (`refcount/`) and how many have gone (`cleanup/`), so that the last
//! one to leave removes the file. `flock` orders everybody: exclusive to write, shared to read what is new. So
//! stock PyTorch processes and ours work on one file at the same time.
//!
//! What makes it safe: a write first reads the log to its end under the exclusive lock, so it knows that the end is
//! whole; then it adds all its records in one system call, and takes them back if that fails. Half a record at the end,
//! found under a lock, is therefore what a writer left that was killed (c10d's needs four calls a record). Readers pass over it,
//! and the next writer, who has the exclusive lock, cuts it off. Nothing else is ever repaired: what does not begin
//! as a store's file does, or goes on as no store writes, may be somebody's thesis, and is left as it is.
//!
//! Every call opens the file anew, as c10d does. A descriptor that stays open would share its lock with forked
//! children, and the lock would keep nobody out; opening also makes NFS look at the server. One descriptor does
//! stay open, but is never locked: while it lives, no other file can get this one's inode number, so a file that
//! was removed or replaced is always noticed.
//!
//! Nothing is forced to disk: the file is for ranks that run now. What a crash of the machine leaves of it is of no use.
//!
//! In a folder in which every user may create files, such as /tmp, another user's file is refused: whoever creates the file
//! first could otherwise choose what all ranks read in it.
//!
//! Not here: waiting for what `get` reads, a barrier by counting (`ops` has both), queues (c10d's file has none).

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::error::Error;
use crate::ops::{DEFAULT_TIMEOUT, NO_SUCH_KEY, NO_SUCH_KEY_HINT, POLL_MAX, POLL_MIN, Store, failure};
use crate::request::{Bytes, Request, Response, show_keys};
use crate::table::{Refusal, parse_number};
use crate::value::Value;
use tenfold_base::{Deadline, ErrorKind, Fault, show_duration};

/// A store in a file that every rank can see, on one host or on a shared file system with `flock`.
///
/// ```
/// use tenfold_store::{FileStore, StoreExt};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("rendezvous");
/// let store = FileStore::open(&path, Some(1))?; // a world of one rank
/// store.set("color", "blue")?;
/// assert_eq!(&*store.get("color")?, b"blue");
/// drop(store);
/// assert!(!path.exists()); // all ranks have left
/// # Ok::<(), tenfold_store::Error>(())
/// ```
#[derive(Debug)]
pub struct FileStore {
    path: PathBuf,
    world_size: Option<usize>,
    timeout: Mutex<Duration>,
    /// Keeps the inode number taken; see above.
    anchor: File,
    replica: Mutex<Replica>,
    /// The process that was counted in, and alone is to be counted out.
    process: u32,
}

/// How to open a [`FileStore`].
#[derive(Clone, Debug)]
pub struct FileStoreOptions {
    /// How many ranks will open the file: when as many have left and nobody is there, it is removed. Without it, the
    /// file stays.
    pub world_size: Option<usize>,
    /// How long an operation may take.
    pub timeout: Duration,
    /// Take a file that looks left over from an earlier run for this run's, as c10d does.
    pub accept_stale: bool,
}

impl Default for FileStoreOptions {
    fn default() -> Self {
        FileStoreOptions { world_size: None, timeout: DEFAULT_TIMEOUT, accept_stale: false }
    }
}

/// A lock is held for microseconds. So even a call that has no time at all waits this long for one, lest `wait` with
/// a zero timeout fail for a key that is there, only because some rank is just writing another. With three PyTorch
/// processes adding without pause on two cores, our slowest of 1000 adds took 66 ms.
const LOCK_PATIENCE: Duration = Duration::from_millis(100);
const LOCK_PAUSE_MIN: Duration = Duration::from_micros(50); // an undisturbed add takes 22 us in all
const LOCK_PAUSE_MAX: Duration = Duration::from_micros(500); // at 2 ms the slowest 1 % of those adds took 15 to 26 ms, so 9 ms

/// How long leaving may take, whatever the store's timeout: a program that ends should end, but a rank that is not
/// counted out leaves the file behind.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

impl FileStore {
    /// Opens the file, or creates it, and counts this object in.
    pub fn open(path: impl AsRef<Path>, world_size: Option<usize>) -> Result<FileStore, Error> {
        FileStore::open_with(path, FileStoreOptions { world_size, ..FileStoreOptions::default() })
    }

    /// As [`FileStore::open`], with every choice.
    pub fn open_with(path: impl AsRef<Path>, options: FileStoreOptions) -> Result<FileStore, Error> {
        let deadline = Deadline::after(options.timeout);
        let given = path.as_ref();
        // Absolute, because the program may change its working directory.
        std::path::absolute(given)
            .map_err(|error| Fault::io("the path cannot be made absolute", error))
            .and_then(|path| FileStore::join(path, options, deadline))
            .map_err(|fault| failure("open", &name(given), deadline, fault))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn join(path: PathBuf, options: FileStoreOptions, deadline: Deadline) -> Result<Self, Fault> {
        let locked = loop {
            let locked =
                Locked::new(open_or_create(&path)?, FlockOperation::NonBlockingLockExclusive, deadline)?;
            // Before we had the lock, the last rank of an earlier group may have removed what we opened.
            if place(&path, &locked.file)? == Place::Here {
                break locked;
            }
            if deadline.passed() {
                return Err(Fault::timeout("others kept removing the file"));
            }
        };
        let mut replica = Replica::default();
        replica.catch_up(&locked.file, Tail::Cut)?;
        if !options.accept_stale
            && let Some(world) = options.world_size
        {
            refuse_stale(&replica, world, &locked.file)?;
        }
        let anchor = second_descriptor(&locked.file)?;
        let mut draft = Draft::default();
        draft.count(REFCOUNT, replica.refcount().saturating_add(1));
        replica.commit(&locked.file, &draft)?;
        Ok(FileStore {
            path,
            world_size: options.world_size,
            timeout: Mutex::new(options.timeout),
            anchor,
            replica: Mutex::new(replica),
            process: std::process::id(),
        })
    }

    /// Looks at the present state.
    fn read<T>(&self, deadline: Deadline, look: impl FnOnce(&Replica) -> T) -> Result<T, Fault> {
        let file = self.open_to_read(deadline)?;
        {
            // A log of the length we know has nothing new, and finding that out needs no lock: so ranks that wait do
            // not keep out the one that writes what they wait for.
            let replica = self.replica();
            if length(&file)? == replica.offset {
                return Ok(look(&replica));
            }
        }
        let locked = Locked::new(file, FlockOperation::NonBlockingLockShared, deadline)?;
        let mut replica = self.replica();
        replica.catch_up(&locked.file, Tail::PassOver)?;
        Ok(look(&replica))
    }

    /// Decides what to write from the present state, and writes it, with nobody in between.
    fn write<T>(
        &self,
        deadline: Deadline,
        decide: impl FnOnce(&Replica, &mut Draft) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        // No O_CREAT here: a new file would not be the one that this object and its peers are in.
        let file = match OpenOptions::new().read(true).write(true).open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(gone(Place::Removed)),
            Err(error) => return Err(Fault::io("cannot open the file to write", error)),
        };
        let locked = Locked::new(file, FlockOperation::NonBlockingLockExclusive, deadline)?;
        // What was opened is ours, and still is what others open.
        if identity(&locked.file)? != identity(&self.anchor)? {
            return Err(gone(Place::Replaced));
        }
        match place(&self.path, &locked.file)? {
            Place::Here => {}
            other => return Err(gone(other)),
        }
        let mut replica = self.replica();
        replica.catch_up(&locked.file, Tail::Cut)?;
        let mut draft = Draft::default();
        let answer = decide(&replica, &mut draft)?;
        replica.commit(&locked.file, &draft)?;
        Ok(answer)
    }

    /// Opens the file; one that is not there may come back (a slow file server, a folder moved and moved back).
    fn open_to_read(&self, deadline: Deadline) -> Result<File, Fault> {
        let mut pause = POLL_MIN;
        loop {
            match File::open(&self.path) {
                Ok(file) if identity(&file)? == identity(&self.anchor)? => return Ok(file),
                Ok(_) => return Err(gone(Place::Replaced)),
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(Fault::io("cannot open the file to read", error));
                }
                Err(_) if deadline.passed() => return Err(gone(Place::Removed)),
                Err(_) => deadline.pause(pause),
            }
            pause = (pause * 2).min(POLL_MAX);
        }
    }

    fn wait(&self, mut missing: Vec<Bytes<'_>>, deadline: Deadline) -> Result<Response, Fault> {
        let mut pause = POLL_MIN;
        loop {
            // Asked before looking, so that the last look is never earlier than the end of the time.
            let last = deadline.passed();
            self.read(deadline, |replica| missing.retain(|key| !replica.values.contains_key(&**key)))?;
            if missing.is_empty() {
                return Ok(Response::Ready);
            }
            if last {
                return Err(Fault::timeout(NO_SUCH_KEY).hint(NO_SUCH_KEY_HINT));
            }
            deadline.pause(pause);
            pause = (pause * 2).min(POLL_MAX);
        }
    }

    /// Taken only by those who already have the file's lock, or need none; never while waiting for it. So a thread
    /// with little time is not held up by one with much.
    fn replica(&self) -> MutexGuard<'_, Replica> {
        // A panic cannot leave a replica half changed: its offset moves with each record.
        self.replica.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts this object out, and removes the file if it was the last one of the last rank.
    fn leave(&self) -> Result<(), Fault> {
        self.write(Deadline::after(LEAVE_TIMEOUT), |replica, draft| {
            let (cleanup, refcount) =
                (replica.cleanup().saturating_add(1), replica.refcount().saturating_sub(1));
            let all_came =
                self.world_size.is_some_and(|world| i64::try_from(world).is_ok_and(|world| cleanup >= world));
            // Under the lock, so that a rank that opens the file just now sees that it is gone. Where it cannot be
            // removed, leaving is still counted.
            if refcount == 0 && all_came && fs::remove_file(&self.path).is_ok() {
                return Ok(());
            }
            draft.count(CLEANUP, cleanup);
            draft.count(REFCOUNT, refcount);
            Ok(())
        })
    }
}

impl Store for FileStore {
    fn call(&self, request: Request<'_>, deadline: Deadline) -> Result<Response, Fault> {
        match request {
            Request::Get { key } => self.read(deadline, |replica| Response::Value(replica.value(&key))),
            Request::MultiGet { keys } => self.read(deadline, |replica| {
                Response::Values(keys.iter().map(|key| replica.value(key)).collect())
            }),
            Request::Check { keys } => self.read(deadline, |replica| {
                Response::Present(keys.iter().all(|key| replica.values.contains_key(&**key)))
            }),
            Request::Wait { keys } => self.wait(keys, deadline),
            Request::NumKeys => self.read(deadline, |replica| Response::Number(replica.num_keys())),
            Request::ListKeys => {
                self.read(deadline, |replica| Response::Keys(replica.values.keys().cloned().collect()))
            }
            Request::Set { key, value } => self.write(deadline, |_, draft| {
                draft.set(&key, &value)?;
                Ok(Response::Done)
            }),
            Request::MultiSet { pairs } => self.write(deadline, |_, draft| {
                pairs.iter().try_for_each(|(key, value)| draft.set(key, value))?;
                Ok(Response::Done)
            }),
            Request::Append { key, value } => self.write(deadline, |replica, draft| {
                let old = replica.values.get(&*key).map_or(&[][..], AsRef::as_ref);
                draft.set(&key, &[old, &value].concat())?;
                Ok(Response::Done)
            }),
            Request::Add { key, delta } => self.write(deadline, |replica, draft| {
                let old = match replica.values.get(&*key) {
                    None => 0,
                    Some(text) => {
                        parse_number(text).ok_or_else(|| Refusal::NotANumber { key: (&*key).into() })?
                    }
                };
                let sum = old.wrapping_add(delta);
                draft.set(&key, sum.to_string().as_bytes())?;
                Ok(Response::Number(sum))
            }),
            Request::CompareSet { key, expected, desired } => self.write(deadline, |replica, draft| {
                let now: Value = match replica.values.get(&*key) {
                    Some(current) if **current != *expected => current.clone(),
                    None if !expected.is_empty() => (&*expected).into(), // c10d's answer
                    _ => {
                        draft.set(&key, &desired)?;
                        (&*desired).into()
                    }
                };
                Ok(Response::Value(Some(now)))
            }),
            Request::Delete { key } => self.write(deadline, |replica, draft| {
                let was_there = replica.values.contains_key(&*key);
                if was_there {
                    draft.delete(&key)?;
                }
                Ok(Response::Deleted(was_there))
            }),
            Request::QueuePush { .. } | Request::QueuePop { .. } | Request::QueueLen { .. } => {
                Err(Fault::unsupported("queues"))
            }
            Request::Barrier { .. } => Err(Fault::unsupported("barrier")),
        }
    }

    fn name(&self) -> String {
        name(&self.path)
    }

    fn timeout(&self) -> Duration {
        *self.timeout.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_timeout(&self, timeout: Duration) -> bool {
        *self.timeout.lock().unwrap_or_else(PoisonError::into_inner) = timeout;
        true
    }

    /// Another object on the same file, counted as one. It starts from what this one has read already.
    fn duplicate(&self) -> Result<Arc<dyn Store>, Fault> {
        let anchor = second_descriptor(&self.anchor)?;
        let replica = self.write(Deadline::after(self.timeout()), |replica, draft| {
            draft.count(REFCOUNT, replica.refcount().saturating_add(1));
            Ok(replica.clone())
        })?;
        Ok(Arc::new(FileStore {
            path: self.path.clone(),
            world_size: self.world_size,
            timeout: Mutex::new(self.timeout()),
            anchor,
            replica: Mutex::new(replica),
            process: std::process::id(),
        }))
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        // A forked child has a copy of this object that was never counted in.
        if self.process != std::process::id() {
            return;
        }
        match self.leave() {
            Ok(()) => {}
            // Somebody cleaned up the folder first, as test suites do.
            Err(fault) if fault.kind == ErrorKind::Lost => {}
            Err(fault) => {
                let path = self.path.display();
                tracing::warn!("file store {path} stays: this rank could not leave it: {}", fault.message);
            }
        }
    }
}

fn name(path: &Path) -> String {
    format!("file {}", path.display())
}

// ── the file and its lock ──────────────────────────────────────────────────────────────────────────────────

/// An open file with a lock on it.
struct Locked {
    file: File,
}

impl Locked {
    /// Asks again and again, because `flock` that waits by itself knows no deadline.
    fn new(file: File, how: FlockOperation, deadline: Deadline) -> Result<Self, Fault> {
        let patience = match deadline.left() {
            Some(left) if left < LOCK_PATIENCE => Deadline::after(LOCK_PATIENCE),
            _ => deadline,
        };
        let start = patience.elapsed();
        let mut pause = LOCK_PAUSE_MIN;
        loop {
            match rustix::fs::flock(&file, how) {
                Ok(()) => return Ok(Locked { file }),
                Err(Errno::INTR) => continue,
                Err(Errno::WOULDBLOCK) if patience.passed() => {
                    return Err(lock_timeout(patience.elapsed().saturating_sub(start)));
                }
                Err(Errno::WOULDBLOCK) => patience.pause(pause),
                Err(error) => {
                    return Err(Fault::io("cannot lock the file", error.into()).hint(
                        "the file system must have `flock`; put the file elsewhere, or use a TCP store",
                    ));
                }
            }
            pause = (pause * 2).min(LOCK_PAUSE_MAX);
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // Closing is not enough: a child that another thread forked meanwhile holds the same lock, until told.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

#[cold]
fn lock_timeout(held: Duration) -> Fault {
    Fault::timeout(format!("another process held the file's lock for {}", show_duration(held))).hint(
        "a store holds it for microseconds: `lslocks` shows who; it is stopped, or its file system hangs, or it is \
         stock PyTorch at a torn record",
    )
}

/// c10d's mode, 0644, less the umask.
fn open_or_create(path: &Path) -> Result<File, Fault> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o644);
    // First without creating: in folders such as /tmp, Linux lets nobody open another user's file with O_CREAT.
    let file = match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => options.create(true).open(path),
        result => result,
    };
    let file = file.map_err(|error| {
        let kind = error.kind();
        let fault = Fault::io("cannot open or create the file", error);
        match kind {
            io::ErrorKind::NotFound => {
                fault.hint("its folder does not exist: create it before any rank starts")
            }
            io::ErrorKind::IsADirectory => fault.hint("name a file in that folder"),
            io::ErrorKind::PermissionDenied => fault.hint("every rank must be able to read and write it"),
            _ => fault,
        }
    })?;
    let metadata = file.metadata().map_err(|error| Fault::io("cannot examine the file", error))?;
    if !metadata.is_file() {
        return Err(Fault::new(ErrorKind::Argument, "this is a device or a pipe, not a file"));
    }
    check_owner(path, &metadata)?;
    Ok(file)
}

/// The rule of Linux's `protected_regular`, also where it is off, and for the file that exists, which is opened without
/// O_CREAT above and so escapes it.
fn check_owner(path: &Path, file: &fs::Metadata) -> Result<(), Fault> {
    const STICKY: u32 = 0o1000;
    const WRITABLE_BY_OTHERS: u32 = 0o022;
    let own = rustix::process::geteuid().as_raw();
    if file.uid() == own {
        return Ok(());
    }
    let folder = path.parent().map(fs::metadata).transpose();
    let folder = folder.map_err(|error| Fault::io("cannot examine the file's folder", error))?;
    let is_shared = |folder: &fs::Metadata| {
        folder.mode() & STICKY != 0 && folder.mode() & WRITABLE_BY_OTHERS != 0 && folder.uid() != file.uid()
    };
    if !folder.is_some_and(|folder| is_shared(&folder)) {
        return Ok(());
    }
    let message = format!(
        "the file belongs to user {}, this process runs as user {own}, and every user may create files in its folder",
        file.uid()
    );
    Err(Fault::new(ErrorKind::Argument, message)
        .hint("put the file into a folder in which only users of this job can create files"))
}

/// Where a file is that was at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Here,
    Removed,
    Replaced,
}

fn place(path: &Path, file: &File) -> Result<Place, Fault> {
    match fs::metadata(path) {
        Ok(there) if (there.dev(), there.ino()) == identity(file)? => Ok(Place::Here),
        Ok(_) => Ok(Place::Replaced),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Place::Removed),
        Err(error) => Err(Fault::io("cannot examine the file", error)),
    }
}

#[cold]
fn gone(place: Place) -> Fault {
    let message = match place {
        Place::Replaced => "the file was replaced by another after this store was opened",
        Place::Here | Place::Removed => "the file was removed after this store was opened",
    };
    Fault::new(ErrorKind::Lost, message)
        .hint("did a clean-up remove it, or a rank leave with a smaller world size? each run needs a path of its own")
}

fn identity(file: &File) -> Result<(u64, u64), Fault> {
    let metadata = file.metadata().map_err(|error| Fault::io("cannot examine the file", error))?;
    Ok((metadata.dev(), metadata.ino()))
}

fn second_descriptor(file: &File) -> Result<File, Fault> {
    file.try_clone().map_err(|error| Fault::io("no descriptor for another object", error))
}

fn length(file: &File) -> Result<u64, Fault> {
    Ok(file.metadata().map_err(|error| Fault::io("cannot examine the file", error))?.len())
}

// ── the log ────────────────────────────────────────────────────────────────────────────────────────────────

const REFCOUNT: &[u8] = b"refcount/";
const CLEANUP: &[u8] = b"cleanup/";
const USER: u8 = b'/';
const DELETED: u8 = b'-';

/// What is done about half a record at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tail {
    /// By readers.
    PassOver,
    /// By those who have the exclusive lock.
    Cut,
}

/// What the log says, up to an offset.
#[derive(Clone, Debug, Default)]
struct Replica {
    values: HashMap<Value, Value>,
    refcount: Option<i64>,
    cleanup: Option<i64>,
    /// Where the next record begins.
    offset: u64,
}

impl Replica {
    fn value(&self, key: &[u8]) -> Option<Value> {
        self.values.get(key).cloned()
    }

    /// Objects there are.
    fn refcount(&self) -> i64 {
        self.refcount.unwrap_or(0)
    }

    /// Objects that have gone.
    fn cleanup(&self) -> i64 {
        self.cleanup.unwrap_or(0)
    }

    /// As c10d counts: with the store's own two.
    fn num_keys(&self) -> i64 {
        let own = usize::from(self.refcount.is_some()) + usize::from(self.cleanup.is_some());
        i64::try_from(self.values.len() + own).expect("a count of things in memory fits 63 bits")
    }

    /// Reads what was added since. The caller has a lock on `file`, so nobody is in the middle of a record.
    fn catch_up(&mut self, mut file: &File, tail: Tail) -> Result<(), Fault> {
        let length = length(file)?;
        if length < self.offset {
            let message = format!("the file shrank from {} to {length} bytes", self.offset);
            return Err(Fault::new(ErrorKind::Corrupt, message)
                .hint("something else writes to it; each run needs a path of its own"));
        }
        if length == self.offset {
            return Ok(());
        }
        file.seek(SeekFrom::Start(self.offset)).map_err(cannot_read)?;
        match self.replay(BufReader::new(file), length) {
            Err(Damage::Torn { .. }) if self.is_unfinished(file, length)? => match tail {
                Tail::PassOver => Ok(()),
                Tail::Cut => self.cut(file, length),
            },
            result => result.map_err(|damage| damage.at(self.offset)),
        }
    }

    /// Applies the records from here to the offset `end`, up to the first that is damaged.
    fn replay(&mut self, mut log: impl Read, end: u64) -> Result<(), Damage> {
        while self.offset < end {
            let mut left = end - self.offset;
            let key = read_string(&mut log, &mut left, "key")?;
            if !is_of_a_store(&key) {
                return Err(Damage::Alien(key));
            }
            let value = read_string(&mut log, &mut left, "value")?;
            self.apply(&key, value)?;
            self.offset = end - left;
        }
        Ok(())
    }

    /// Is what follows the last whole record the beginning of one that a store was writing? Only after a record: a file
    /// without one need not be a store's at all.
    #[cold]
    fn is_unfinished(&self, file: &File, end: u64) -> Result<bool, Fault> {
        const LOOKED_AT: u64 = 64;
        let mut tail = vec![0; (end - self.offset).min(LOOKED_AT) as usize];
        file.read_exact_at(&mut tail, self.offset).map_err(cannot_read)?;
        Ok(self.offset > 0 && could_be_a_record(&tail))
    }

    /// Removes half a record. The caller has the exclusive lock, so its writer is dead.
    #[cold]
    fn cut(&self, file: &File, end: u64) -> Result<(), Fault> {
        let (length, offset) = (end - self.offset, self.offset);
        file.set_len(offset).map_err(|error| {
            let what =
                format!("cannot remove the {length} bytes at offset {offset} that a killed process left");
            Fault::io(what, error)
        })?;
        tracing::warn!(
            "removed {length} bytes at the end of a store's file: a process was killed while it wrote"
        );
        Ok(())
    }

    fn apply(&mut self, key: &[u8], value: Vec<u8>) -> Result<(), Damage> {
        match key {
            REFCOUNT => self.refcount = Some(parse_number(&value).ok_or(Damage::Count(REFCOUNT, value))?),
            CLEANUP => self.cleanup = Some(parse_number(&value).ok_or(Damage::Count(CLEANUP, value))?),
            [DELETED, USER, key @ ..] => drop(self.values.remove(key)),
            [USER, key @ ..] => drop(self.values.insert(key.into(), value.into())),
            _ => unreachable!("such a key was refused"),
        }
        Ok(())
    }

    /// Adds the draft to the end of the log: all of it or nothing. The caller has the exclusive lock and caught up.
    fn commit(&mut self, file: &File, draft: &Draft) -> Result<(), Fault> {
        if draft.log.is_empty() {
            return Ok(());
        }
        if let Err(error) = file.write_all_at(&draft.log, self.offset) {
            return Err(self.take_back(file, draft, error));
        }
        let end = self.offset + draft.log.len() as u64;
        self.replay(draft.log.as_slice(), end).map_err(|damage| damage.at(self.offset))
    }

    /// A write failed: what it left is surely ours, since we have the exclusive lock and the log ended here.
    #[cold]
    fn take_back(&self, file: &File, draft: &Draft, error: io::Error) -> Fault {
        let kind = error.kind();
        let mut what = format!("cannot add {} bytes at offset {}", draft.log.len(), self.offset);
        if let Err(error) = file.set_len(self.offset) {
            what = format!("{what}, nor take back what was added of them ({error})");
        }
        let fault = Fault::io(what, error);
        match kind {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                fault.hint("make room and try again; all that was stored before is still there")
            }
            _ => fault,
        }
    }
}

/// Records that are to be added.
#[derive(Debug, Default)]
struct Draft {
    log: Vec<u8>,
}

impl Draft {
    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), Fault> {
        self.record(&[&[USER], key], value)
    }

    fn delete(&mut self, key: &[u8]) -> Result<(), Fault> {
        self.record(&[&[DELETED, USER], key], &[])
    }

    fn count(&mut self, counter: &[u8], count: i64) {
        self.record(&[counter], count.to_string().as_bytes()).expect("a counter is short");
    }

    fn record(&mut self, key: &[&[u8]], value: &[u8]) -> Result<(), Fault> {
        let key_length = length_field(key.iter().map(|part| part.len()).sum(), "key")?;
        let value_length = length_field(value.len(), "value")?;
        self.log.extend_from_slice(&key_length);
        key.iter().for_each(|part| self.log.extend_from_slice(part));
        self.log.extend_from_slice(&value_length);
        self.log.extend_from_slice(value);
        Ok(())
    }
}

fn length_field(length: usize, what: &str) -> Result<[u8; 4], Fault> {
    u32::try_from(length).map(u32::to_le_bytes).map_err(|_| {
        let message =
            format!("a {what} of {length} bytes is too long: the file format ends at {} bytes", u32::MAX);
        Fault::new(ErrorKind::Limit, message)
    })
}

fn is_of_a_store(key: &[u8]) -> bool {
    matches!(key, REFCOUNT | CLEANUP | [USER, ..] | [DELETED, USER, ..])
}

/// Are these the first bytes of a record that a store would write?
fn could_be_a_record(bytes: &[u8]) -> bool {
    let Some((length, rest)) = bytes.split_first_chunk() else { return true };
    let length = u32::from_le_bytes(*length) as usize;
    match rest.get(..length) {
        Some(key) => is_of_a_store(key),
        None => {
            let own = [REFCOUNT, CLEANUP];
            matches!(rest, [] | [USER, ..] | [DELETED] | [DELETED, USER, ..])
                || own.iter().any(|key| length == key.len() && key.starts_with(rest))
        }
    }
}

/// Why a record cannot be one.
#[derive(Debug)]
enum Damage {
    /// It ends too early: `part` needs more than is left.
    Torn {
        part: String,
        needed: u64,
        left: u64,
    },
    /// No store writes such a key.
    Alien(Vec<u8>),
    /// One of the store's own counters is no number.
    Count(&'static [u8], Vec<u8>),
    Unreadable(io::Error),
}

impl Damage {
    #[cold]
    fn at(self, offset: u64) -> Fault {
        let what = match self {
            Damage::Torn { part, needed, left } => {
                format!("a record breaks off: its {part} needs {needed} bytes, {left} are left")
            }
            Damage::Alien(key) => {
                format!("a record has the key {}, which no store writes", show_keys(&[key]))
            }
            Damage::Count(counter, text) => {
                format!("the counter {} is {}", show_keys(&[counter]), show_keys(&[text]))
            }
            Damage::Unreadable(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
                return cannot_read(error);
            }
            Damage::Unreadable(_) => "the file shrank while it was read".into(),
        };
        let hint = match offset {
            0 => "no store has written this file, or only begun to: is the path right? it was left as it is",
            _ => {
                "another program wrote to the file, or the disk is damaged: end the job, remove the file, start again"
            }
        };
        Fault::new(ErrorKind::Corrupt, format!("the file is damaged at offset {offset}: {what}")).hint(hint)
    }
}

#[cold]
fn cannot_read(error: io::Error) -> Fault {
    Fault::io("cannot read the file", error)
}

/// Reads a length and as many bytes, all of which must be within `left`; nothing is allocated that is not there.
fn read_string(log: &mut impl Read, left: &mut u64, what: &'static str) -> Result<Vec<u8>, Damage> {
    let mut take = |needed: u64, part: &str| match left.checked_sub(needed) {
        Some(rest) => {
            *left = rest;
            Ok(())
        }
        None => Err(Damage::Torn { part: part.into(), needed, left: *left }),
    };
    let mut field = [0; 4];
    take(field.len() as u64, &format!("{what} length"))?;
    log.read_exact(&mut field).map_err(Damage::Unreadable)?;
    let length = u32::from_le_bytes(field);
    take(length.into(), what)?;
    let mut bytes = vec![0; length as usize];
    log.read_exact(&mut bytes).map_err(Damage::Unreadable)?;
    Ok(bytes)
}

// ── left over from an earlier run? ─────────────────────────────────────────────────────────────────────────

/// Clocks tick in steps of up to 10 ms, and a file server's may differ from ours.
const CLOCK_SLACK: Duration = Duration::from_secs(1);

/// Refuses a file that all ranks of a world had joined and that nobody has written to since this process began.
///
/// It takes both. Full alone is no proof: clones count as well, so ranks that came early can fill the count before the
/// last one comes. Old alone is none either: a rank may start long after the others have written and wait. What is
/// left is a rank that starts, by hand perhaps, a second after the others have both cloned and fallen silent; that
/// is what `accept_stale` is for.
fn refuse_stale(replica: &Replica, world: usize, file: &File) -> Result<(), Fault> {
    let joined = usize::try_from(replica.refcount().saturating_add(replica.cleanup())).unwrap_or(0);
    if world == 0 || joined < world {
        return Ok(());
    }
    let written = file.metadata().and_then(|metadata| metadata.modified());
    let written = written.map_err(|error| Fault::io("cannot examine the file", error))?;
    let (Some(start), now) = (process_start(), wall_clock()) else { return Ok(()) };
    if start.duration_since(written).is_ok_and(|before| before > CLOCK_SLACK) {
        let ago = show_duration(now.duration_since(written).unwrap_or_default());
        let keys = replica.values.len();
        let message = format!(
            "left over from an earlier run: {world} of {world} ranks had joined, {keys} keys, last written {ago} ago"
        );
        return Err(Fault::new(ErrorKind::Corrupt, message)
            .hint("remove it or use another path; if it is this run's, open it with `accept_stale`"));
    }
    Ok(())
}

#[expect(
    clippy::disallowed_methods,
    reason = "a file's age is told by the wall clock; no operation waits by it"
)]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// When this process began, by the wall clock.
#[cfg(target_os = "linux")]
fn process_start() -> Option<SystemTime> {
    use rustix::time::{ClockId, clock_gettime};
    let stat = String::from_utf8_lossy(&fs::read("/proc/self/stat").ok()?).into_owned();
    // The second field is the program's name in parentheses, which may hold anything; the 22nd is the start.
    let after_name = stat.rsplit_once(')')?.1;
    let ticks: u64 = after_name.split_ascii_whitespace().nth(19)?.parse().ok()?;
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    let start = Duration::from_millis(ticks.checked_mul(1000)? / per_second);
    // The same clock as the ticks'. `btime` of /proc/stat would do, but is whole seconds.
    let since_boot = Duration::try_from(clock_gettime(ClockId::Boottime)).ok()?;
    wall_clock().checked_sub(since_boot.checked_sub(start)?)
}

#[cfg(not(target_os = "linux"))]
fn process_start() -> Option<SystemTime> {
    None
}

#[cfg(test)]
mod tests;
