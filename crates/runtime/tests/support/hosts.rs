//! Several hosts on one machine: network namespaces around a bridge, with cables that can be cut without a word.
//!
//! ```text
//!   host-0 eth0 ──── port0 ┐                    ┌ port9 ──── eth0 store
//!   host-1 eth0 ──── port1 ┼─ bridge namespace ─┘
//!   host-2 eth0 ─link.py─ port2 ┘
//! ```
//!
//! Every packet enters the bridge through the port of its sender, so every fault is a rule there: "what comes from host-0 for
//! host-1 is dropped". Neither host gets an error, as in a network that is broken in the middle. A rule on the sender's own side
//! would make its sends fail. ARP always passes, as in a network that drops packets between two machines but has both.
//!
//! Processes, shared memory and abstract Unix sockets: the namespaces share the first two and not the last, which is what
//! tells two hosts apart.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use tenfold_store::{Server, ServerOptions};

use super::namespace::{Namespace, run};

/// The store's place among the hosts: the last one.
const STORE: &str = "store";

/// What joins a host to the others.
#[derive(Clone, Copy, Debug, Default)]
pub enum Cable {
    #[default]
    Ideal,
    Slow(Slow),
}

/// A cable that delays every packet, and loses some.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slow {
    /// Each way.
    pub delay: Duration,
    /// From this host to the others, between 0 and 1.
    pub loss_out: f64,
    /// From the others to this host.
    pub loss_in: f64,
    pub seed: u64,
}

/// What a slow cable has counted: packets that came to it, and those of them that it lost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    pub out_seen: u64,
    pub out_lost: u64,
    pub in_seen: u64,
    pub in_lost: u64,
}

#[derive(Debug)]
struct Host {
    namespace: Namespace,
    address: Ipv4Addr,
    link: Option<Link>,
}

/// Hosts that can reach each other, and a place for the store that all of them can reach. Gone with this value.
#[derive(Debug)]
pub struct Hosts {
    hosts: Vec<Host>,
    bridge: Namespace,
    cuts: Mutex<BTreeSet<(usize, usize)>>,
}

impl Hosts {
    /// `None`, after printing why, where this machine cannot have network namespaces.
    pub fn join(cables: &[Cable]) -> Option<Hosts> {
        match Hosts::obstacle() {
            Some(reason) => {
                println!("skipped, no network namespaces here: {reason}");
                None
            }
            None => Some(Hosts::lay(cables)),
        }
    }

    /// Hosts with ideal cables.
    pub fn near(count: usize) -> Option<Hosts> {
        Hosts::join(&vec![Cable::Ideal; count])
    }

    /// What this machine lacks. Whatever fails beyond these is a failure of the test.
    fn obstacle() -> Option<String> {
        let trial = match run("ip", &["-V"], "").and_then(|()| Namespace::new("trial")) {
            Ok(namespace) => namespace,
            Err(reason) => return Some(reason),
        };
        let try_all = || -> Result<(), String> {
            run("ip", &["-batch", "-"], "link add bridge type bridge\n")?;
            run("nft", &["-f", "-"], "table netdev trial { }\n")?;
            run("python3", &["-c", "open('/dev/net/tun')"], "")
        };
        trial.inside(try_all).err()
    }

    fn lay(cables: &[Cable]) -> Hosts {
        let bridge = Namespace::new("bridge").unwrap();
        bridge.inside(|| ip("link add bridge type bridge\nlink set bridge up\n"));
        let names = (0..cables.len()).map(|index| format!("host-{index}")).chain([STORE.to_owned()]);
        let cables = cables.iter().copied().chain([Cable::Ideal]);
        let hosts = std::iter::zip(names, cables).enumerate().map(|(index, (name, cable))| {
            let address = Ipv4Addr::new(10, 77, 0, u8::try_from(index + 1).expect("a few hosts"));
            let namespace = Namespace::new(&name).unwrap();
            let link = bridge.inside(|| plug_in(index, cable, &namespace));
            namespace.inside(|| ip(&format!("addr add {address}/24 dev eth0\nlink set eth0 up\n")));
            Host { namespace, address, link }
        });
        Hosts { hosts: hosts.collect(), bridge, cuts: Mutex::default() }
    }

    /// Gives these hosts a second network: `eth1`, on a bridge of its own.
    pub fn add_rail(&self, hosts: &[usize]) {
        self.bridge.inside(|| ip("link add bridge1 type bridge\nlink set bridge1 up\n"));
        for &host in hosts {
            let namespace = &self.hosts[host].namespace;
            let (rail, end, path) = (rail_of(host), format!("railend{host}"), namespace.path());
            self.bridge.inside(|| {
                ip(&format!(
                    "link add {rail} type veth peer name {end}\nlink set {rail} master bridge1 up\n\
                     link set {end} netns {path} name eth1\n"
                ));
            });
            let address = Ipv4Addr::new(10, 78, 0, u8::try_from(host + 1).expect("a few hosts"));
            namespace.inside(|| ip(&format!("addr add {address}/24 dev eth1\nlink set eth1 up\n")));
        }
    }

    /// Takes the second network away from a host that has one: nothing arrives by it, and nothing says so.
    pub fn cut_rail(&self, host: usize) {
        self.bridge.inside(|| ip(&format!("link set {} nomaster\n", rail_of(host))));
    }

    /// How many there are, without the store's.
    pub fn count(&self) -> usize {
        self.hosts.len() - 1
    }

    pub fn namespace(&self, host: usize) -> &Namespace {
        &self.hosts[host].namespace
    }

    pub fn address(&self, host: usize) -> Ipv4Addr {
        self.hosts[host].address
    }

    /// A store server of this process that listens where every host reaches it, and in no other network.
    pub fn serve_store(&self) -> Server {
        let store = &self.hosts[self.count()];
        let listener = store.namespace.inside(|| TcpListener::bind((store.address, 0)).unwrap());
        let options = ServerOptions::new(store.address.to_string(), 0).listener(listener);
        store.namespace.inside(|| Server::start(options).unwrap())
    }

    /// Drops all packets between `host` and the others, including the store.
    pub fn isolate(&self, host: usize) {
        let others = (0..self.hosts.len()).filter(|other| *other != host);
        self.cut(others.flat_map(|other| [(host, other), (other, host)]));
    }

    /// What the store and the hosts say to each other is lost.
    pub fn isolate_store(&self) {
        self.isolate(self.count());
    }

    /// What `from` says to `to` is lost, but not the other way round.
    pub fn cut_one_way(&self, from: usize, to: usize) {
        self.cut([(from, to)]);
    }

    /// All cuts are mended.
    pub fn heal(&self) {
        self.cuts.lock().unwrap().clear();
        self.apply();
    }

    /// What all hosts have sent to each other so far: packets and bytes, with all headers. The store's are not counted.
    pub fn traffic(&self) -> (u64, u64) {
        self.received_by((0..self.count()).map(|host| format!("port{host}")))
    }

    /// The same for the second network.
    pub fn rail_traffic(&self, hosts: &[usize]) -> (u64, u64) {
        self.received_by(hosts.iter().map(|host| rail_of(*host)))
    }

    fn received_by(&self, ports: impl Iterator<Item = String>) -> (u64, u64) {
        let table = self.bridge.inside(|| std::fs::read_to_string("/proc/thread-self/net/dev").unwrap());
        let mut sum = (0, 0);
        for port in ports {
            let rest =
                |line: &str| Some(line.trim_start().strip_prefix(&port)?.strip_prefix(':')?.to_owned());
            let numbers = table.lines().find_map(rest).expect("a port");
            let mut received = numbers.split_whitespace().map(|number| number.parse::<u64>().unwrap());
            let (bytes, packets) = (received.next().unwrap_or(0), received.next().unwrap_or(0));
            sum = (sum.0 + packets, sum.1 + bytes);
        }
        sum
    }

    /// What the slow cable of `host` has counted so far.
    pub fn loss(&mut self, host: usize) -> Loss {
        self.hosts[host].link.as_mut().expect("a slow cable").count()
    }

    fn cut(&self, ways: impl IntoIterator<Item = (usize, usize)>) {
        self.cuts.lock().unwrap().extend(ways);
        self.apply();
    }

    /// The rules for all cuts replace the rules before in one transaction.
    fn apply(&self) {
        let cuts = self.cuts.lock().unwrap();
        let mut rules = "table netdev cuts { }\ndelete table netdev cuts\ntable netdev cuts {\n".to_owned();
        for sender in 0..self.hosts.len() {
            writeln!(rules, "chain from{sender} {{ type filter hook ingress device port{sender} priority 0;")
                .unwrap();
            for (_, receiver) in cuts.iter().filter(|(from, _)| *from == sender) {
                writeln!(rules, "ip daddr {} drop", self.hosts[*receiver].address).unwrap();
            }
            rules.push_str("}\n");
        }
        rules.push_str("}\n");
        self.bridge.inside(|| run("nft", &["-f", "-"], &rules).unwrap());
    }
}

/// The port of a host on the bridge of the second network.
fn rail_of(host: usize) -> String {
    format!("rail{host}")
}

/// Joins `host` to the bridge of the namespace we are in; its end of the cable is called `eth0`.
fn plug_in(index: usize, cable: Cable, host: &Namespace) -> Option<Link> {
    let (port, end, path) = (format!("port{index}"), format!("end{index}"), host.path());
    let link = match cable {
        Cable::Ideal => {
            ip(&format!("link add {port} type veth peer name {end}\n"));
            None
        }
        Cable::Slow(slow) => Some(Link::start(&end, &port, slow)),
    };
    ip(&format!(
        "link set {port} master bridge txqueuelen 10000 up\nlink set {end} txqueuelen 10000\n\
         link set {end} netns {path} name eth0\n"
    ));
    link
}

fn ip(batch: &str) {
    run("ip", &["-batch", "-"], batch).unwrap();
}

/// A running `link.py`.
#[derive(Debug)]
struct Link {
    process: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Link {
    fn start(near: &str, far: &str, slow: Slow) -> Link {
        let way = |loss: f64, seed: u64| format!("{},{loss},{seed}", slow.delay.as_secs_f64());
        let mut process = Command::new("python3")
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/link.py"))
            .args([near, far, &way(slow.loss_out, 2 * slow.seed), &way(slow.loss_in, 2 * slow.seed + 1)])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (orders, answers) = (process.stdin.take(), BufReader::new(process.stdout.take().unwrap()));
        let mut link = Link { process, orders, answers };
        assert_eq!(link.answer(), "ready");
        link
    }

    fn count(&mut self) -> Loss {
        self.orders.as_mut().expect("it is open until the end").write_all(b"count\n").unwrap();
        let answer = self.answer();
        let numbers: Vec<u64> = answer.split(' ').map(|number| number.parse().unwrap()).collect();
        let [out_seen, out_lost, in_seen, in_lost] = numbers[..] else { panic!("`{answer}` is not a count") };
        Loss { out_seen, out_lost, in_seen, in_lost }
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.orders = None; // it ends with its input
        let _ = self.process.wait();
    }
}
