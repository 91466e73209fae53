//! A network namespace (and a host name) without a name of its own.
//!
//! Only a descriptor keeps it alive. Nothing stands in `/run/netns`, so two tests never meet, and a test that is killed
//! leaves nothing behind: the kernel takes the namespace away, and every device in it, with the last process that has it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::process::{Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

#[derive(Debug)]
pub struct Namespace {
    network: File,
    names: File,
}

impl Namespace {
    /// A new one whose only device is a loopback; the reason if this process may not make one.
    pub fn new(hostname: &str) -> Result<Namespace, String> {
        // A process has to be the first in a namespace; this one stays until a descriptor holds it.
        let mut first = Command::new("unshare")
            .args(["--net", "--uts", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("unshare: {error}"))?;
        let mut echo = String::new();
        // `unshare` may have failed: its words are the reason, not the broken pipe.
        let _ = first.stdin.as_mut().unwrap().write_all(b"inside\n");
        BufReader::new(first.stdout.as_mut().unwrap()).read_line(&mut echo).unwrap();
        if echo != "inside\n" {
            let output = first.wait_with_output().unwrap();
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
        }
        let open = |kind| File::open(format!("/proc/{}/ns/{kind}", first.id())).unwrap();
        let namespace = Namespace { network: open("net"), names: open("uts") };
        first.stdin = None;
        first.wait().unwrap();
        namespace.inside(|| {
            fs::write("/proc/sys/kernel/hostname", hostname).unwrap();
            // No test needs neighbour discovery and its delays. In a kernel without IPv6, there is nothing to switch off.
            let _ = fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1");
            let _ = fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
            run("ip", &["-batch", "-"], "link set lo up\n").unwrap();
        });
        Ok(namespace)
    }

    /// Runs `action` in here: sockets it opens belong here, processes it starts live here.
    ///
    /// Only the calling thread moves, and it comes back, also after a panic.
    pub fn inside<T>(&self, action: impl FnOnce() -> T) -> T {
        let home = Home {
            network: File::open("/proc/thread-self/ns/net").unwrap(),
            names: File::open("/proc/thread-self/ns/uts").unwrap(),
        };
        home.leave_for(self);
        action()
    }

    /// What `ip link set … netns` takes.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.network.as_raw_fd())
    }
}

/// Where a thread came from.
struct Home {
    network: File,
    names: File,
}

impl Home {
    fn leave_for(&self, away: &Namespace) {
        enter(away.network.as_fd(), LinkNameSpaceType::Network);
        enter(away.names.as_fd(), LinkNameSpaceType::HostNameAndNISDomainName);
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        enter(self.network.as_fd(), LinkNameSpaceType::Network);
        enter(self.names.as_fd(), LinkNameSpaceType::HostNameAndNISDomainName);
    }
}

fn enter(namespace: BorrowedFd<'_>, kind: LinkNameSpaceType) {
    move_into_link_name_space(namespace, Some(kind))
        .expect("a process that may make a namespace may enter it");
}

/// Runs a program to its end with `input`; what it complained about if it failed.
pub(super) fn run(program: &str, arguments: &[&str], input: &str) -> Result<(), String> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{program}: {error}"))?;
    // A program that does not read its input says why itself.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("{program} {}: {}\n{input}", arguments.join(" "), complaint.trim()))
    }
}
