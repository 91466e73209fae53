//! Detects whether a process was killed for lack of memory, by the counters of the control group.

use std::fs;
use std::path::{Path, PathBuf};

use tenfold_console::show_size;

use super::sayings::Cause;

/// Detects that the kernel has killed processes of our control group for lack of memory.
#[derive(Debug)]
pub(crate) struct MemoryWatch {
    group: Option<Group>,
    kills: u64,
}

#[derive(Debug)]
struct Group {
    /// Has a line `oom_kill N`.
    counter: PathBuf,
    /// Of the group and its parents; the smallest one applies.
    limits: Vec<PathBuf>,
}

/// There were kills since the watch began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryKills {
    /// In bytes, if the control group has one.
    pub(super) limit: Option<u64>,
}

impl MemoryWatch {
    /// Watches the control group of this process; ranks are in it too.
    pub(crate) fn begin() -> Self {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default(); // without it no group is watched
        MemoryWatch::at(&groups, Path::new("/sys/fs/cgroup"))
    }

    pub(super) fn at(groups: &str, root: &Path) -> Self {
        let group = Group::find(groups, root);
        let kills = group.as_ref().and_then(Group::kills).unwrap_or(0);
        MemoryWatch { group, kills }
    }

    /// Present if the kernel has killed a process since.
    pub(crate) fn kills(&self) -> Option<MemoryKills> {
        let group = self.group.as_ref()?;
        (group.kills()? > self.kills).then(|| MemoryKills { limit: group.limit() })
    }
}

impl Group {
    /// From the lines of `/proc/self/cgroup`: `0::/a/b` is version 2, `5:memory:/a/b` version 1.
    fn find(groups: &str, root: &Path) -> Option<Self> {
        let found = |wanted: &str| {
            groups.lines().find_map(|line| {
                let mut fields = line.splitn(3, ':');
                let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
                controllers.split(',').any(|controller| controller == wanted).then_some(path)
            })
        };
        let (root, path, counter, limit) = match (found("memory"), found("")) {
            (Some(path), _) => (root.join("memory"), path, "memory.oom_control", "memory.limit_in_bytes"),
            (None, Some(path)) => (root.to_path_buf(), path, "memory.events", "memory.max"),
            (None, None) => return None,
        };
        // In a container the path is often one of the host, and the root here is the container's own.
        let inner = root.join(path.trim_start_matches('/'));
        let inner = if inner.join(counter).is_file() { inner } else { root.clone() };
        let limits = inner.ancestors().take_while(|folder| folder.starts_with(&root));
        Some(Group {
            counter: inner.join(counter),
            limits: limits.map(|folder| folder.join(limit)).collect(),
        })
    }

    fn kills(&self) -> Option<u64> {
        let text = fs::read_to_string(&self.counter).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    }

    fn limit(&self) -> Option<u64> {
        const NO_LIMIT: u64 = 1 << 60; // no limit is a huge number in version 1, and `max` in version 2
        let limits = self.limits.iter().filter_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok());
        limits.min().filter(|&limit| limit < NO_LIMIT)
    }
}

impl MemoryKills {
    pub(super) fn cause(self) -> Cause {
        match self.limit {
            Some(limit) => {
                let limit = show_size(usize::try_from(limit).unwrap_or(usize::MAX));
                Cause {
                    words: format!("killed by the memory limit ({limit}) of its control group"),
                    hint: Some(
                        "raise the limit of the container or the job, or use less memory in each rank".into(),
                    ),
                }
            }
            None => Cause {
                words: "killed by the kernel's OOM killer".into(),
                hint: Some("see `dmesg | grep -i oom`; use less memory in each rank, or fewer ranks".into()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_groups_are_found_in_both_versions_and_in_containers() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("memory/docker/x/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n");
        write("memory/docker/x/memory.limit_in_bytes", "1048576\n");
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        let watch = MemoryWatch::at("7:cpu,cpuacct:/docker/x\n5:memory:/docker/x\n0::/\n", root.path());
        write("memory/docker/x/memory.oom_control", "oom_kill 1\n");
        assert_eq!(watch.kills(), Some(MemoryKills { limit: Some(1 << 20) }));
        write("memory.events", "oom_kill 0\n");
        write("memory.max", "4096\n");
        let watch = MemoryWatch::at("0::/../a/path/of/the/host\n", root.path());
        write("memory.events", "oom_kill 1\n");
        assert_eq!(watch.kills(), Some(MemoryKills { limit: Some(4096) }));
        for nothing in ["", "nonsense", "1:name=systemd:/x\n"] {
            assert_eq!(MemoryWatch::at(nothing, root.path()).kills(), None);
        }
        assert_eq!(MemoryWatch::at("0::/\n", &root.path().join("nowhere")).kills(), None);
    }
}
