//! Hosts made of network namespaces, joined by a switch, so that one machine shows what many would do.
//!
//! ```text
//!   host-0 eth0 ──── port0 ┐
//!   host-1 eth0 ──── port1 ┼─ bridge, in a namespace of its own; the store listens here
//!   host-2 eth0 ──── port2 ┘
//! ```
//!
//! Hosts with several links have an interface, a bridge and a network for each.
//!
//! All implementations run in the same hosts. To each of them these are different machines: they have other
//! addresses, host names and abstract Unix sockets. Processors and memory are the same, so the ranks of all
//! hosts share them. Nothing leads from here to the machine's own network, so any addresses will do. Orders
//! to ranks go through a Unix socket, which is a file, and do not cross the links. The store is used only
//! while ranks join.
//!
//! A link has a queue with a token bucket at each end (`tbf`), if a rate was asked for. For a delay, links
//! are pairs of TAP devices with a program between them (`peers/cable.py`), because many kernels have no
//! `netem`.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use tenfold_console::Program;
use tenfold_store::{Server, ServerOptions};

use super::super::Failure;
use super::layout::{Layout, Limits, Rate, interface};
use super::namespace::{Namespace, ask_tool, run_tool};

const CABLE_PROGRAM: &str = include_str!("../peers/cable.py");
/// Packets; only bytes should limit a queue.
const QUEUE_PACKETS: usize = 10_000;
/// A bucket holds what passes in this time: enough for a timer that is late, too little for an operation.
const BUCKET_SECONDS: f64 = 1e-3;
const BUCKET_BYTES_MIN: f64 = 16_384.0;
/// What waits in front of a bucket before packets are dropped, as in a switch of a few megabytes.
const QUEUE_SECONDS: f64 = 10e-3;
const QUEUE_BYTES_MIN: f64 = 262_144.0;

/// One of the namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Host(usize),
    Switch,
}

/// They are removed with this value.
#[derive(Debug)]
pub(crate) struct Hosts {
    pub(crate) layout: Layout,
    pub(crate) limits: Limits,
    hosts: Vec<Namespace>,
    switch: Namespace,
    store: Server,
    _cables: Option<Cables>,
}

impl Hosts {
    pub(crate) fn make(layout: Layout, limits: Limits, python: &Path) -> Result<Self, Failure> {
        let switch = Namespace::new("switch")?;
        let names = (0..layout.hosts).map(host_name);
        let hosts = names.map(|name| Namespace::new(&name)).collect::<Result<Vec<_>, _>>()?;
        let (store, cables) = switch.inside(|| {
            let address = switch_address();
            let ends = || every_link(layout.hosts, limits.links);
            let cables = limits.delay.map(|delay| Cables::start(python, ends(), delay.0)).transpose()?;
            (0..limits.links).try_for_each(|link| {
                run_tool("ip", &format!("link add {} type bridge\n", bridge(link)))?;
                run_tool("ip", &plug_in(&hosts, link, cables.is_some()))
            })?;
            run_tool("ip", &format!("addr add {address}/24 dev {}\n", bridge(0)))?;
            if let Some(rate) = limits.rate {
                run_tool(
                    "tc",
                    &ends().map(|(host, link)| limit(&port(host, link), rate)).collect::<String>(),
                )?;
            }
            let store = TcpListener::bind((address, 0))
                .map_err(|error| error.to_string())
                .and_then(|listener| {
                    let options = ServerOptions::new(address.to_string(), 0).listener(listener);
                    Server::start(options).map_err(|error| error.to_string())
                })
                .map_err(|error| Failure::new(format!("cannot start a store for the hosts: {error}")))?;
            Ok((store, cables))
        })??;
        for (index, host) in hosts.iter().enumerate() {
            host.inside(|| {
                (0..limits.links).try_for_each(|link| {
                    let (name, address) = (interface(link), host_address(index, link));
                    run_tool("ip", &format!("addr add {address}/24 dev {name}\nlink set {name} up\n"))?;
                    limits.rate.map_or(Ok(()), |rate| run_tool("tc", &limit(&name, rate)))
                })
            })??;
        }
        Ok(Hosts { layout, limits, hosts, switch, store, _cables: cables })
    }

    /// Where ranks on every host reach the store.
    pub(crate) fn store(&self) -> SocketAddr {
        self.store.address()
    }

    /// Runs `action` in a host or at the switch.
    pub(crate) fn inside<T>(&self, place: Place, action: impl FnOnce() -> T) -> Result<T, Failure> {
        match place {
            Place::Host(host) => self.hosts[host].inside(action),
            Place::Switch => self.switch.inside(action),
        }
    }

    /// Writes the programs that an MPI with this daemon starts its ranks with.
    pub(crate) fn write_agents(&self, folder: &Path, daemon: &Path) -> Result<Agents, Failure> {
        let write = |name: &str, script: String| {
            let path = folder.join(name);
            std::fs::write(&path, script)
                .and_then(|()| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)))
                .map_err(|error| Failure::new(format!("cannot write `{}`: {error}", path.display())))?;
            Ok(path)
        };
        let script = format!("#!/bin/sh\nexec {} '{}' \"$@\"\n", tied(), daemon.display());
        // The launcher may look for this name in the command.
        let name = daemon.file_name().unwrap_or_default().to_string_lossy();
        Ok(Agents { shell: write("enter-host", self.shell_script())?, daemon: write(&name, script)? })
    }

    fn shell_script(&self) -> String {
        let mut script = "#!/bin/sh\ncase \"$1\" in\n".to_owned();
        for (index, host) in self.hosts.iter().enumerate() {
            let (network, names) = host.paths();
            let _to_a_string = writeln!(script, "{}) network={network} names={names} ;;", host_name(index));
        }
        script += "*) echo \"no host $1\" >&2; exit 1 ;;\nesac\nshift\n";
        let enter = "nsenter --net=\"$network\" --uts=\"$names\" sh -c \"$*\"";
        script + &format!("exec {} {enter}\n", tied())
    }

    /// All bytes that have passed the links so far.
    pub(crate) fn traffic(&self) -> Result<Traffic, Failure> {
        let counted =
            if self.limits.rate.is_some() { self.traffic_of_buckets()? } else { self.traffic_of_ports()? };
        counted.ok_or_else(|| Failure::new("cannot read how many bytes passed the links"))
    }

    /// A bucket counts what leaves it as the wire would carry it: with the headers of every packet.
    fn traffic_of_buckets(&self) -> Result<Option<Traffic>, Failure> {
        let sent = |device: &str| {
            let text = ask_tool("tc", &["-s", "-j", "qdisc", "show", "dev", device])?;
            Ok::<_, Failure>(parse_bucket(&text))
        };
        let mut directions = Vec::new();
        for (host, link) in every_link(self.hosts.len(), self.limits.links) {
            directions.push(self.hosts[host].inside(|| sent(&interface(link)))??);
            directions.push(self.switch.inside(|| sent(&port(host, link)))??);
        }
        Ok(directions.into_iter().collect::<Option<Vec<u64>>>().map(Traffic))
    }

    /// Devices count a packet that is cut up only by a network card as one, with one set of headers.
    fn traffic_of_ports(&self) -> Result<Option<Traffic>, Failure> {
        // Of the thread: the process itself may be in another network.
        let text = self.switch.inside(|| std::fs::read_to_string("/proc/thread-self/net/dev"))?;
        let text = text.map_err(|error| Failure::new(format!("cannot read /proc/net/dev: {error}")))?;
        let ports = every_link(self.hosts.len(), self.limits.links).map(|(host, link)| port(host, link));
        let pairs = ports.map(|port| parse_device(&text, &port));
        let pairs: Option<Vec<[u64; 2]>> = pairs.collect();
        Ok(pairs.map(|pairs| Traffic(pairs.concat())))
    }
}

/// Programs by which an MPI starts ranks on our hosts.
///
/// If its launcher is killed, its daemons would not notice: the network through which they would see it ends
/// as well. So every process on the way is tied to the one that started it.
#[derive(Debug)]
pub(crate) struct Agents {
    /// Runs a command on the host that is its first argument, as `ssh` does.
    pub(crate) shell: PathBuf,
    /// Its daemon.
    pub(crate) daemon: PathBuf,
}

/// The words for a shell that tie the command behind them to its parent.
fn tied() -> String {
    let own = Program::own().command();
    let words = std::iter::once(own.get_program()).chain(own.get_args());
    let quoted = words.map(|word| format!("'{}' ", word.to_string_lossy().replace('\'', r"'\''")));
    quoted.collect::<String>() + "bench host-server --"
}

/// Bytes by link and direction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Traffic(Vec<u64>);

impl Traffic {
    /// What has passed the busiest direction of any link since `earlier`.
    pub(crate) fn busiest_since(&self, earlier: &Traffic) -> u64 {
        self.0.iter().zip(&earlier.0).map(|(now, then)| now.saturating_sub(*then)).max().unwrap_or(0)
    }
}

pub(crate) fn host_name(host: usize) -> String {
    format!("host-{host}")
}

/// Each link of each host.
fn every_link(hosts: usize, links: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..hosts).flat_map(move |host| (0..links).map(move |link| (host, link)))
}

fn bridge(link: usize) -> String {
    format!("bridge{link}")
}

fn port(host: usize, link: usize) -> String {
    format!("port{host}-{link}")
}

/// An end of a link, before its host has it.
fn end(host: usize, link: usize) -> String {
    format!("end{host}-{link}")
}

pub(crate) fn host_address(host: usize, link: usize) -> Ipv4Addr {
    let [network, host] = [77 + link, host + 1].map(|part| u8::try_from(part).expect("there are few"));
    Ipv4Addr::new(10, network, 0, host)
}

fn switch_address() -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, 254)
}

/// The orders to `ip` that give every host a link to the bridge of this number.
fn plug_in(hosts: &[Namespace], link: usize, has_cables: bool) -> String {
    let mut orders = String::new();
    let (bridge, interface) = (bridge(link), interface(link));
    for (index, host) in hosts.iter().enumerate() {
        let (port, end, (network, _)) = (port(index, link), end(index, link), host.paths());
        if !has_cables {
            orders += &format!("link add {port} type veth peer name {end}\n");
        }
        orders += &format!("link set {port} master {bridge} txqueuelen {QUEUE_PACKETS} up\n");
        orders += &format!("link set {end} txqueuelen {QUEUE_PACKETS}\n");
        orders += &format!("link set {end} netns {network} name {interface}\n");
    }
    orders + &format!("link set {bridge} up\n")
}

/// The order to `tc` that limits what leaves through a device.
fn limit(device: &str, rate: Rate) -> String {
    let bucket = rate.bytes_in(BUCKET_SECONDS).max(BUCKET_BYTES_MIN) as u64;
    let queue = rate.bytes_in(QUEUE_SECONDS).max(QUEUE_BYTES_MIN) as u64;
    format!("qdisc add dev {device} root tbf rate {}bit burst {bucket}b limit {queue}b\n", rate.0 as u64)
}

/// From the JSON of `tc -s`.
fn parse_bucket(text: &str) -> Option<u64> {
    let queues: Vec<serde_json::Value> = serde_json::from_str(text).ok()?;
    queues.iter().find(|queue| queue["kind"] == "tbf")?["bytes"].as_u64()
}

/// Received and sent bytes of a device, from `/proc/net/dev`.
fn parse_device(text: &str, device: &str) -> Option<[u64; 2]> {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix(device)?.strip_prefix(':'))?;
    let mut numbers = line.split_whitespace().map(|number| number.parse().ok());
    Some([numbers.next()??, numbers.nth(7)??])
}

/// A running `cable.py`: the links of all hosts. It ends with its standard input, hence also with us.
#[derive(Debug)]
struct Cables(Child);

impl Cables {
    fn start(
        python: &Path,
        ends: impl Iterator<Item = (usize, usize)>,
        delay: std::time::Duration,
    ) -> Result<Self, Failure> {
        let mut command = Program::own().command();
        command.args(["bench", "host-server", "--"]).arg(python).args(["-c", CABLE_PROGRAM]);
        command.arg(delay.as_secs_f64().to_string());
        command.args(ends.flat_map(|(host, link)| [end(host, link), port(host, link)]));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let cannot = |reason: &str| {
            Failure::new(format!("cannot delay packets: {reason}"))
                .hint("check that /dev/net/tun exists and may be opened, or leave out `--link-delay`")
        };
        let mut cables = Cables(command.spawn().map_err(|error| cannot(&error.to_string()))?);
        let mut line = String::new();
        if let Some(output) = cables.0.stdout.as_mut() {
            let _no_line = BufReader::new(output).read_line(&mut line);
        }
        if line == "ready\n" {
            return Ok(cables);
        }
        let mut said = String::new();
        if let Some(mut errors) = cables.0.stderr.take() {
            let _no_text = std::io::Read::read_to_string(&mut errors, &mut said);
        }
        Err(cannot(said.lines().last().unwrap_or("it ended early")))
    }
}

impl Drop for Cables {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _reaped = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_small_and_its_queue_is_not() {
        let order = limit("port1-0", Rate(1e9));
        assert_eq!(order, "qdisc add dev port1-0 root tbf rate 1000000000bit burst 125000b limit 1250000b\n");
        let order = limit("eth0", Rate(1e7));
        assert_eq!(order, "qdisc add dev eth0 root tbf rate 10000000bit burst 16384b limit 262144b\n");
    }

    #[test]
    fn counters_of_the_kernel_are_read() {
        let text = "Inter-|   Receive  |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|\
                    bytes packets errs drop fifo colls carrier compressed\n\
                    port1:    3749      18    0    0    0     0          0         0     2728      15 0 0 0 0 0 0\n\
                    port10:    1      18    0    0    0     0          0         0     2      15 0 0 0 0 0 0\n";
        assert_eq!(parse_device(text, "port1"), Some([3749, 2728]));
        assert_eq!(parse_device(text, "port10"), Some([1, 2]));
        assert_eq!(parse_device(text, "port2"), None);
        let text = r#"[{"kind":"noqueue","bytes":1},{"kind":"tbf","handle":"8001:","bytes":42,"drops":0}]"#;
        assert_eq!(parse_bucket(text), Some(42));
        assert_eq!(parse_bucket("[]"), None);
    }

    #[test]
    fn the_busiest_direction_counts() {
        let (before, after) = (Traffic(vec![10, 20, 30, 40]), Traffic(vec![15, 120, 30, 90]));
        assert_eq!(after.busiest_since(&before), 100);
    }

    /// What this machine can do is tested with the command, see `tests/python/test_bench_hosts.py`.
    #[test]
    fn every_host_gets_a_link() {
        assert_eq!(plug_in(&[], 1, false), "link set bridge1 up\n");
        assert_eq!((host_address(31, 0), host_name(3)), (Ipv4Addr::new(10, 77, 0, 32), "host-3".to_owned()));
        assert_eq!(host_address(0, 7), Ipv4Addr::new(10, 84, 0, 1));
        assert_eq!(every_link(2, 2).collect::<Vec<_>>(), [(0, 0), (0, 1), (1, 0), (1, 1)]);
    }
}
