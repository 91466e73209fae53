//! A network namespace, with a host name of its own, that has no name in the file system.
//!
//! Descriptors of this process keep it alive, and the processes that run in it. So the kernel removes it and
//! all of its devices with the last of these, also if this process is killed.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::super::Failure;

#[derive(Debug)]
pub(crate) struct Namespace {
    network: File,
    names: File,
}

impl Namespace {
    /// A new one, whose only device is loopback.
    pub(crate) fn new(hostname: &str) -> Result<Self, Failure> {
        let cannot =
            |error: std::io::Error| Failure::new(format!("cannot make a network namespace: {error}"));
        // The first process of the namespace stays until descriptors hold it.
        let mut first = Command::new("unshare")
            .args(["--net", "--uts", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(cannot)?;
        let (mut input, output) = (first.stdin.take(), first.stdout.take());
        if let Some(input) = &mut input {
            // If this fails, `unshare` has failed, and prints why.
            let _ = input.write_all(b"inside\n");
        }
        let mut echo = String::new();
        let read = output.map_or(Ok(0), |output| BufReader::new(output).read_line(&mut echo));
        let inside = read.is_ok() && echo == "inside\n";
        let open = |kind: &str| File::open(format!("/proc/{}/ns/{kind}", first.id()));
        let namespace = inside.then(|| Ok(Namespace { network: open("net")?, names: open("uts")? }));
        drop(input);
        let said = first.wait_with_output().map_err(cannot)?;
        let namespace = namespace.ok_or_else(|| refused(&said.stderr))?.map_err(cannot)?;
        namespace.inside(|| {
            rustix::system::sethostname(hostname.as_bytes())
                .map_err(|error| Failure::new(format!("cannot set a host name: {error}")))?;
            // Addresses are IPv4. Without IPv6 there is no neighbour discovery that would be counted.
            for which in ["all", "default"] {
                let _a_kernel_without_it =
                    std::fs::write(format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6"), "1");
            }
            run_tool("ip", "link set lo up\n")
        })??;
        Ok(namespace)
    }

    /// Runs `action` in here: its sockets belong to this network, its processes run on this host.
    ///
    /// Only the calling thread moves, and it returns before this function does.
    pub(crate) fn inside<T>(&self, action: impl FnOnce() -> T) -> Result<T, Failure> {
        let cannot =
            |error: std::io::Error| Failure::new(format!("cannot enter a network namespace: {error}"));
        let home = Namespace {
            network: File::open("/proc/thread-self/ns/net").map_err(cannot)?,
            names: File::open("/proc/thread-self/ns/uts").map_err(cannot)?,
        };
        self.enter().map_err(cannot)?;
        let back = Return(home);
        let result = action();
        drop(back);
        Ok(result)
    }

    fn enter(&self) -> std::io::Result<()> {
        move_into_link_name_space(self.network.as_fd(), Some(LinkNameSpaceType::Network))?;
        move_into_link_name_space(self.names.as_fd(), Some(LinkNameSpaceType::HostNameAndNISDomainName))?;
        Ok(())
    }

    /// The files by which other programs find its network and its host name.
    pub(crate) fn paths(&self) -> (String, String) {
        let path = |file: &File| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        (path(&self.network), path(&self.names))
    }
}

/// Takes the thread back where it came from, also after a panic.
struct Return(Namespace);

impl Drop for Return {
    fn drop(&mut self) {
        self.0.enter().expect("a thread that could leave its namespace may return to it");
    }
}

/// Feeds `lines` to `ip` or `tc`.
pub(crate) fn run_tool(program: &str, lines: &str) -> Result<(), Failure> {
    let mut child = Command::new(program)
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| no_tool(program, &error))?;
    if let Some(mut input) = child.stdin.take() {
        // If this fails, the program has failed, and prints why.
        let _ = input.write_all(lines.as_bytes());
    }
    let output = child.wait_with_output().map_err(|error| no_tool(program, &error))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Failure::new(format!("`{program}` failed: {}\n  | {}", said.trim(), lines.trim_end())))
}

/// What `ip` or `tc` prints.
pub(crate) fn ask_tool(program: &str, arguments: &[&str]) -> Result<String, Failure> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| no_tool(program, &error))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Failure::new(format!("`{program} {}` failed: {}", arguments.join(" "), said.trim())))
}

fn no_tool(program: &str, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot start `{program}`, which makes the network of the hosts: {error}"))
        .hint("on Debian: apt-get install iproute2")
}

fn refused(stderr: &[u8]) -> Failure {
    let said = String::from_utf8_lossy(stderr);
    Failure::new(format!("cannot make a network namespace: {}", said.trim())).hint(
        "run it as root, or allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, or \
               kernel.apparmor_restrict_unprivileged_userns=0",
    )
}

/// Makes sure that this process may make network namespaces. If only a user namespace allows it, this program
/// starts again in one, with the same arguments and the same process id.
pub(crate) fn ensure_allowed() -> Result<(), Failure> {
    const NEW_HOST: [&str; 3] = ["--net", "--uts", "true"];
    // With a network of its own, because a thread may return only to a namespace of the same user namespace.
    const OWN_ROOT: [&str; 4] = ["--user", "--map-root-user", "--net", "--uts"];
    let try_to = |arguments: &[&str]| {
        let command = Command::new("unshare").args(arguments).stdin(Stdio::null()).output();
        let output = command.map_err(|error| {
            Failure::new(format!("cannot start `unshare`: {error}"))
                .hint("on Debian: apt-get install util-linux")
        })?;
        Ok(if output.status.success() { Ok(()) } else { Err(output.stderr) })
    };
    if try_to(&NEW_HOST)?.is_ok() {
        return Ok(());
    }
    // The same as above, inside: so the program that starts again does not get here.
    if let Err(said) = try_to(&[&OWN_ROOT[..], &["unshare"], &NEW_HOST].concat())? {
        return Err(refused(&said));
    }
    let program = std::env::current_exe()
        .map_err(|error| Failure::new(format!("cannot find this program to start it again: {error}")))?;
    let start = "ip link set lo up; exec \"$@\"";
    let mut again = Command::new("unshare");
    again.args(OWN_ROOT).args(["sh", "-c", start, "sh"]).arg(program).args(std::env::args_os().skip(1));
    let error = again.exec();
    Err(Failure::new(format!("cannot start `unshare`: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_missing_is_named_with_the_command_that_installs_it() {
        let failure = run_tool("no-such-program", "link\n").unwrap_err().to_string();
        assert!(failure.contains("`no-such-program`") && failure.contains("iproute2"), "{failure}");
        let failure = ask_tool("no-such-program", &["-s"]).unwrap_err().to_string();
        assert!(failure.contains("iproute2"), "{failure}");
    }

    #[test]
    fn a_refusal_says_why_and_what_to_do() {
        let failure = refused(b"unshare: unshare failed: Operation not permitted\n").to_string();
        assert!(failure.contains("Operation not permitted\n  hint: run it as root"), "{failure}");
    }
}
