//! A Unix socket as a file that only its owner can open, and that goes when it is no longer listened on.
//!
//! The mode is set on the socket *before* it gets its name: Linux makes the file with the socket's own mode, so that there
//! is no moment in which others could connect, whatever the umask, and the umask (which all threads share) is not touched.
//!
//! A file that a killed process left behind is replaced; one that somebody listens on is an error, and so is a file of any
//! other kind.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// What the system has room for, without the zero at the end.
const PATH_MAX: usize = 107;
/// Clients that may wait to be accepted.
const BACKLOG: i32 = 128;

/// The file of a socket that this process listens on. Dropping it removes the file.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and number of the file, to know it by.
    identity: (u64, u64),
    /// A forked child does not remove what is its parent's.
    owner: u32,
}

impl SocketFile {
    /// Listens on a new socket file, for its owner alone.
    ///
    /// # Errors
    /// If the path is empty or too long, if something is there that is no socket or on which somebody listens, or if the
    /// system says no. The error names the path.
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
            let what = format!("its path has {length} bytes, and the system has room for {PATH_MAX}");
            return Err(wrong(io::Error::new(io::ErrorKind::InvalidInput, what)));
        }
        make_way(path).map_err(wrong)?;
        let listener = listen(path).map_err(wrong)?;
        let file = fs::symlink_metadata(path).map_err(wrong)?;
        let identity = (file.dev(), file.ino());
        // Found again at the end, wherever the process is by then.
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
            let _ = fs::remove_file(&self.path); // somebody else may have removed it
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

/// Removes the socket of somebody who is gone.
fn make_way(path: &Path) -> io::Result<()> {
    let file = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    let taken = |what: &str| Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
    if !file.file_type().is_socket() {
        return taken("it already exists and is no socket");
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(_) => taken("it already exists, and a process listens on it"),
    }
}

/// Without the number that Rust puts behind it.
fn words(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_string()
}
