//! The sockets on which ranks answer questions: a folder with a socket file for each, which the ranks create
//! themselves (`TENFOLD_WORKER_SERVER`; see `control/` of the crate `tenfold`).

use std::fmt;
use std::fs::{DirBuilder, Permissions};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::PathBuf;

use tempfile::TempDir;

pub(super) const VARIABLE: &str = "TENFOLD_WORKER_SERVER";

/// The longest path of a socket, and the most that a rank's file name adds.
const PATH_MAX: usize = 107;
const FILE_MAX: usize = "/rank-9999999.sock".len();

#[derive(Debug)]
pub(super) struct WorkerSockets {
    folder: PathBuf,
    /// Removed with the launcher, if the user did not choose a folder.
    _temporary: Option<TempDir>,
}

impl WorkerSockets {
    /// `asked` is the folder, or empty for a temporary one whose name begins with `name`.
    pub(super) fn open(asked: &str, name: &str) -> Result<Self, String> {
        let wrong =
            |folder: &str, error: std::io::Error| format!("--worker-server: cannot create {folder}: {error}");
        let (folder, temporary) = if asked.is_empty() {
            let only_owner = Permissions::from_mode(0o700);
            let temporary = tempfile::Builder::new().prefix(name).permissions(only_owner).tempdir();
            let temporary = temporary.map_err(|error| wrong("a temporary folder", error))?;
            (temporary.path().to_path_buf(), Some(temporary))
        } else {
            // Ranks may change their working directory before they open it.
            let folder = std::path::absolute(asked).map_err(|error| wrong(asked, error))?;
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&folder)
                .map_err(|error| wrong(asked, error))?;
            // The owner of a socket's folder can replace the socket.
            let owner = std::fs::metadata(&folder).map_err(|error| wrong(asked, error))?.uid();
            let own = rustix::process::geteuid().as_raw();
            if owner != own && owner != 0 {
                return Err(format!(
                    "--worker-server: {asked} belongs to user {owner}, this process runs as user {own}\n  \
                     hint: choose a folder that does not exist, or one of your own"
                ));
            }
            (folder, None)
        };
        let length = folder.as_os_str().len();
        if length + FILE_MAX > PATH_MAX {
            return Err(format!(
                "--worker-server: {} has {length} bytes, but the folder of a socket may have at most {}\n  hint: use a shorter path",
                folder.display(),
                PATH_MAX - FILE_MAX
            ));
        }
        Ok(WorkerSockets { folder, _temporary: temporary })
    }

    /// The file of a spare, which keeps it when it becomes a rank. `number` differs from those of other spares on this
    /// node.
    pub(super) fn of_spare(&self, number: usize) -> PathBuf {
        self.folder.join(format!("spare-{number}.sock"))
    }

    /// The file of a rank of the job.
    pub(super) fn of(&self, rank: usize) -> PathBuf {
        self.folder.join(format!("rank-{rank}.sock"))
    }
}

/// As in `/tmp/job/rank-N.sock`.
impl fmt::Display for WorkerSockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/rank-N.sock", self.folder.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_for_its_owner_and_short_enough() {
        let here = tempfile::tempdir().unwrap();
        let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let asked = here.path().join("a/b");
        let sockets = WorkerSockets::open(asked.to_str().unwrap(), "unused").unwrap();
        assert_eq!((sockets.of(7), mode(&asked)), (asked.join("rank-7.sock"), 0o700));
        let sockets = WorkerSockets::open("", "tenfold-test-").unwrap();
        let folder = sockets.folder.clone();
        assert_eq!(mode(&folder), 0o700);
        drop(sockets);
        assert!(!folder.exists());
        let error = WorkerSockets::open(&here.path().join("l".repeat(90)).to_string_lossy(), "").unwrap_err();
        assert!(error.contains("may have at most 89\n  hint: use a shorter path"), "{error}");
    }

    #[test]
    fn a_folder_of_another_user_is_refused() {
        let here = tempfile::tempdir().unwrap();
        if std::os::unix::fs::chown(here.path(), Some(65534), None).is_err() {
            return; // only root can give a folder away
        }
        let error = WorkerSockets::open(here.path().to_str().unwrap(), "").unwrap_err();
        assert!(error.contains(" belongs to user 65534, this process runs as user 0\n"), "{error}");
    }
}
