//! The file itself: who may open it, its lock, and whether it still exists at its path.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;
use std::{fs, io};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use tenfold_base::{Deadline, ErrorKind, Fault, show_duration};

use super::{LOCK_PATIENCE, LOCK_PAUSE_MAX, LOCK_PAUSE_MIN};

/// An open file with a lock on it.
pub(super) struct Locked {
    pub(super) file: File,
}

impl Locked {
    /// Polls, because a blocking `flock` has no deadline.
    pub(super) fn new(file: File, how: FlockOperation, deadline: Deadline) -> Result<Self, Fault> {
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
                    return Err(Fault::io("cannot lock the file", error.into())
                        .hint("put the file on a file system that supports `flock`, or use a TCP store"));
                }
            }
            pause = (pause * 2).min(LOCK_PAUSE_MAX);
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // Closing is not enough: a child forked by another thread holds the same lock until it is released
        // explicitly.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

#[cold]
pub(super) fn lock_timeout(held: Duration) -> Fault {
    Fault::timeout(format!("another process held the file's lock for {}", show_duration(held))).hint(
        "find the process with `lslocks`: a store holds the lock for microseconds, unless it is stopped, its file system hangs, or it is \
         stock PyTorch at a torn record",
    )
}

/// c10d's mode, 0644, less the umask.
pub(super) fn open_or_create(path: &Path) -> Result<File, Fault> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o644);
    // First without creating: in folders such as /tmp, Linux does not let a process open another user's file
    // with O_CREAT.
    let file = match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => options.create(true).open(path),
        result => result,
    };
    let file = file.map_err(|error| {
        let kind = error.kind();
        let fault = Fault::io("cannot open or create the file", error);
        match kind {
            io::ErrorKind::NotFound => fault.hint("create its folder before any rank starts"),
            io::ErrorKind::IsADirectory => fault.hint("name a file in that folder"),
            io::ErrorKind::PermissionDenied => fault.hint("make it readable and writable for every rank"),
            _ => fault,
        }
    })?;
    let metadata = file.metadata().map_err(|error| Fault::io("cannot examine the file", error))?;
    if !metadata.is_file() {
        return Err(Fault::new(ErrorKind::Argument, "not a regular file, but a device or a pipe"));
    }
    check_owner(path, &metadata)?;
    Ok(file)
}

/// The rule of Linux's `protected_regular`, also on systems where it is off, and also for an existing file,
/// which is opened without O_CREAT above and so is exempt from it.
pub(super) fn check_owner(path: &Path, file: &fs::Metadata) -> Result<(), Fault> {
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
pub(super) enum Place {
    Here,
    Removed,
    Replaced,
}

pub(super) fn place(path: &Path, file: &File) -> Result<Place, Fault> {
    match fs::metadata(path) {
        Ok(there) if (there.dev(), there.ino()) == identity(file)? => Ok(Place::Here),
        Ok(_) => Ok(Place::Replaced),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Place::Removed),
        Err(error) => Err(Fault::io("cannot examine the file", error)),
    }
}

#[cold]
pub(super) fn gone(place: Place) -> Fault {
    let message = match place {
        Place::Replaced => "the file was replaced by another after this store was opened",
        Place::Here | Place::Removed => "the file was removed after this store was opened",
    };
    Fault::new(ErrorKind::Lost, message)
        .hint("use a new path for each run, and check that no clean-up removed the file and that all ranks use the same world size")
}

pub(super) fn identity(file: &File) -> Result<(u64, u64), Fault> {
    let metadata = file.metadata().map_err(|error| Fault::io("cannot examine the file", error))?;
    Ok((metadata.dev(), metadata.ino()))
}

pub(super) fn second_descriptor(file: &File) -> Result<File, Fault> {
    file.try_clone().map_err(|error| Fault::io("cannot duplicate the file's descriptor", error))
}

pub(super) fn length(file: &File) -> Result<u64, Fault> {
    Ok(file.metadata().map_err(|error| Fault::io("cannot examine the file", error))?.len())
}
