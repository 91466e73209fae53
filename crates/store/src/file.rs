//! A store in a file that every rank can see, byte for byte c10d's `FileStore`.
//!
//! The file is a log that only grows: `u32 LE key length, key, u32 LE value length, value`, repeated. The
//! last record of a key wins. User keys are written as `/key`, a deletion as `-/key`. Two counters of the
//! store itself say how many objects are open (`refcount/`) and how many have left (`cleanup/`), so that the
//! last one to leave removes the file. `flock` orders all processes: exclusive to write, shared to read what
//! is new. So stock PyTorch processes and ours can use one file at the same time.
//!
//! Why this is safe: a write first reads the log to its end under the exclusive lock, so it knows that the
//! end is whole. Then it adds all its records in one system call, and takes them back if that fails. Half a
//! record at the end, found under a lock, is therefore the rest of a killed writer (c10d's needs four calls
//! per record). Readers skip it, and the next writer, which has the exclusive lock, cuts it off. Nothing else
//! is ever repaired: a file that does not begin as a store's file, or has records that no store writes, may
//! be a user's document. It is left unchanged.
//!
//! Every call opens the file again, as c10d does. A descriptor that stays open would share its lock with
//! forked children, and the lock would exclude no one. Opening also makes NFS ask the server. One descriptor
//! stays open, but is never locked: while it is open, no other file can get this one's inode number, so a
//! removed or replaced file is always noticed.
//!
//! Nothing is forced to disk: the file is for ranks that run now. After a crash of the machine it is useless.
//!
//! In a folder in which every user may create files, such as /tmp, another user's file is refused. Otherwise
//! the user who creates the file first could choose what all ranks read in it.
//!
//! Not here: waiting for what `get` reads, a barrier by counting (`ops` has both), queues (c10d's file has none).

mod lock;
mod log;
mod stale;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::FlockOperation;

use self::lock::{Locked, Place, gone, identity, length, open_or_create, place, second_descriptor};
use self::log::{CLEANUP, Draft, REFCOUNT, Replica, Tail};
use self::stale::refuse_stale;
use crate::error::Error;
use crate::ops::{DEFAULT_TIMEOUT, NO_SUCH_KEY, NO_SUCH_KEY_HINT, POLL_MAX, POLL_MIN, Store, failure};
use crate::request::{Bytes, Request, Response};
use crate::table::{Refusal, parse_number};
use crate::value::Value;
use tenfold_base::{Deadline, ErrorKind, Fault};

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
    /// The process that was counted in, and that alone must be counted out.
    process: u32,
}

/// How to open a [`FileStore`].
#[derive(Clone, Debug)]
pub struct FileStoreOptions {
    /// How many ranks will open the file: when this many have left and none is left in it, the file is
    /// removed. Without it, the file stays.
    pub world_size: Option<usize>,
    /// How long an operation may take.
    pub timeout: Duration,
    /// Accept a file that looks left over from an earlier run, as c10d does.
    pub accept_stale: bool,
}

impl Default for FileStoreOptions {
    fn default() -> Self {
        FileStoreOptions { world_size: None, timeout: DEFAULT_TIMEOUT, accept_stale: false }
    }
}

/// A lock is held for microseconds. So even a call without any time left waits this long for one. Otherwise
/// `wait` with a zero timeout could fail for a key that exists, only because another rank is writing at that
/// moment. With three PyTorch processes adding without pause on two cores, our slowest of 1000 adds took 66
/// ms.
const LOCK_PATIENCE: Duration = Duration::from_millis(100);
const LOCK_PAUSE_MIN: Duration = Duration::from_micros(50); // an undisturbed add takes 22 us in all
const LOCK_PAUSE_MAX: Duration = Duration::from_micros(500); // at 2 ms the slowest 1 % of those adds took 15 to 26 ms, so 9 ms

/// How long leaving may take, whatever the store's timeout: a program that exits should exit soon, but a rank
/// that is not counted out leaves the file behind.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

impl FileStore {
    /// Opens the file, or creates it, and counts this object in.
    pub fn open(path: impl AsRef<Path>, world_size: Option<usize>) -> Result<FileStore, Error> {
        FileStore::open_with(path, FileStoreOptions { world_size, ..FileStoreOptions::default() })
    }

    /// As [`FileStore::open`], with all options.
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
            // Before we got the lock, the last rank of an earlier group may have removed the file that we
            // opened.
            if place(&path, &locked.file)? == Place::Here {
                break locked;
            }
            if deadline.passed() {
                return Err(Fault::timeout("other processes kept removing the file"));
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
            // If the log has the length we know, it has nothing new, and no lock is needed to see that. So
            // waiting ranks do not block the rank that writes what they wait for.
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

    /// Decides what to write from the present state, and writes it, all under one lock.
    fn write<T>(
        &self,
        deadline: Deadline,
        decide: impl FnOnce(&Replica, &mut Draft) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        // No O_CREAT: a new file would not be the one that this object and its peers use.
        let file = match OpenOptions::new().read(true).write(true).open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(gone(Place::Removed)),
            Err(error) => return Err(Fault::io("cannot open the file to write", error)),
        };
        let locked = Locked::new(file, FlockOperation::NonBlockingLockExclusive, deadline)?;
        // The opened file is ours, and it is still the one that other processes open.
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

    /// Opens the file. A missing file may reappear (a slow file server, a folder moved and moved back).
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
            // Checked before reading, so that the last read is never earlier than the deadline.
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

    /// Taken only by threads that already have the file's lock, or need none; never while waiting for it. So
    /// a thread with a short deadline does not wait for one with a long deadline.
    fn replica(&self) -> MutexGuard<'_, Replica> {
        // A panic cannot leave a replica half changed: its offset advances with each record.
        self.replica.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts this object out, and removes the file if it was the last one of the last rank.
    fn leave(&self) -> Result<(), Fault> {
        self.write(Deadline::after(LEAVE_TIMEOUT), |replica, draft| {
            let (cleanup, refcount) =
                (replica.cleanup().saturating_add(1), replica.refcount().saturating_sub(1));
            let all_came =
                self.world_size.is_some_and(|world| i64::try_from(world).is_ok_and(|world| cleanup >= world));
            // Under the lock, so that a rank that opens the file at this moment sees that it was removed. If
            // it cannot be removed, leaving is still counted.
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

    /// Another object on the same file, counted separately. It starts from what this one has read already.
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
            // Another process cleaned up the folder first, as test suites do.
            Err(fault) if fault.kind == ErrorKind::Lost => {}
            Err(fault) => {
                let path = self.path.display();
                tracing::warn!(
                    "file store {path} is not removed: this rank could not leave it: {}",
                    fault.message
                );
            }
        }
    }
}

fn name(path: &Path) -> String {
    format!("file {}", path.display())
}

#[cfg(test)]
mod tests;
