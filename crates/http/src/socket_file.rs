//! A Unix socket as a file that only its owner can open, and that is removed when the socket is closed.
//!
//! The mode is set on the socket *before* it gets its name: Linux creates the file with the socket's own
//! mode. So there is no moment in which other users could connect, whatever the umask, and the umask (which
//! all threads share) is not touched.
//!
//! A file that a killed process left behind is replaced. If a process listens on the file, or if it is of
//! another kind, that is an error.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// The longest path that the system supports, without the zero at the end.
const PATH_MAX: usize = 107;
/// Clients that may wait to be accepted.
const BACKLOG: i32 = 128;

/// The file of a socket that this process listens on. Dropping it removes the file.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode of the file, to recognise it.
    identity: (u64, u64),
    /// A forked child does not remove its parent's file.
    owner: u32,
}

impl SocketFile {
    /// Listens on a new socket file, for its owner alone.
    ///
    /// # Errors
    /// If the path is empty or too long, if a file exists that is not a socket or on which a process listens,
    /// or if the system refuses. The error names the path.
    pub fn bind(path: impl AsRef<Path>) -> io::Result<(UnixListener, SocketFile)> {
        let path = path.as_ref();
        let wrong = |error: io::Error| {
            io::Error::new(error.kind(), format!("cannot listen on {}: {}", path.display(), words(&error)))
        };
        let length = path.as_os_str().len();
        if length == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path of a socket is empty"));
        }
        if length > PATH_MAX {
            let what = format!("its path has {length} bytes, the limit is {PATH_MAX}");
            return Err(wrong(io::Error::new(io::ErrorKind::InvalidInput, what)));
        }
        make_way(path).map_err(wrong)?;
        let listener = listen(path).map_err(wrong)?;
        let file = fs::symlink_metadata(path).map_err(wrong)?;
        let identity = (file.dev(), file.ino());
        // Absolute, because the process may change its working directory.
        let path = std::path::absolute(path).map_err(wrong)?;
        Ok((listener, SocketFile { path, identity, owner: std::process::id() }))
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_ours =
            fs::symlink_metadata(&self.path).is_ok_and(|file| (file.dev(), file.ino()) == self.identity);
        if is_ours && self.owner == std::process::id() {
            let _ = fs::remove_file(&self.path); // another process may have removed it
        }
    }
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}

/// Removes the socket file of a process that has exited.
fn make_way(path: &Path) -> io::Result<()> {
    let file = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    let taken = |what: &str| Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
    if !file.file_type().is_socket() {
        return taken("it already exists and is not a socket");
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(_) => taken("it already exists, and a process listens on it"),
    }
}

/// The system's error text without the number that Rust appends.
fn words(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_string()
}
