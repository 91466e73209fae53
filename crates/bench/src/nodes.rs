//! `tenfold bench launch --simulated-nodes`: how long many nodes take to join a job, and what they ask of the
//! store for that.
//!
//! The store is a separate process. The nodes are threads of this one: each has the two threads and two
//! connections of a real launcher, and no ranks. So the figures contain the client side of all nodes, which in
//! a cluster is spread over the hosts.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::time::{Duration, Instant};

use serde_json::json;
use tenfold_launch::Simulation;
use tenfold_store::{Facts, TcpStore};

use super::cores::Cores;
use super::report::align;
use super::server::{Recipe, Server, raise_file_limit};
use super::{Failure, Interrupt};
use tenfold_console::ProgressLine;

/// For all nodes to join, and to end.
const PATIENCE: Duration = Duration::from_secs(300);
/// Connections of one node, and what the rest of this process needs.
const FILES_A_NODE: u64 = 2;
const FILES_OTHER: u64 = 64;

/// One line of the table.
#[derive(Debug)]
pub(crate) struct Row {
    nodes: usize,
    joined: Traffic,
    ended: Traffic,
    server_cpu: Option<Duration>,
}

/// What happened since the start of the first node.
#[derive(Debug)]
struct Traffic {
    time: Duration,
    requests: u64,
    bytes: u64,
    states: u64,
}

pub(crate) fn measure(counts: &[usize], interrupt: &Interrupt) -> Result<Vec<Row>, Failure> {
    let files = raise_file_limit();
    let progress = ProgressLine::new();
    let mut rows = Vec::new();
    for &nodes in counts {
        let needed = nodes as u64 * FILES_A_NODE + FILES_OTHER;
        if needed > files {
            return Err(Failure::new(format!(
                "{nodes} nodes need {needed} open files; the limit is {files}"
            ))
            .hint("simulate fewer nodes, or raise the hard limit with `ulimit -Hn`"));
        }
        progress.show(format_args!("{nodes} nodes"));
        rows.push(measure_one(nodes, interrupt)?);
    }
    progress.clear();
    Ok(rows)
}

fn measure_one(nodes: usize, interrupt: &Interrupt) -> Result<Row, Failure> {
    let failed = |text: String| Failure::new(text).during(format_args!("{nodes} simulated nodes"));
    let server = Server::start(&Recipe::tenfold(None)?, &Cores::default(), interrupt)?;
    let observer = TcpStore::connect(&server.address.ip().to_string(), server.address.port())
        .map_err(|error| failed(error.to_string()))?;
    let facts = || observer.server_facts().map_err(|error| failed(error.to_string()));
    let is_interrupted = || interrupt.check().is_err();
    let before = facts()?;
    let start = Instant::now();
    let simulation =
        Simulation::start(server.address, "simulated", nodes).map_err(|error| failed(error.to_string()))?;
    let traffic = |time: Duration| {
        let after = facts()?;
        let bytes = |facts: &Facts| facts.bytes_in + facts.bytes_out;
        Ok(Traffic {
            time,
            requests: requests(&after) - requests(&before),
            bytes: bytes(&after) - bytes(&before),
            states: simulation.states().map_err(failed)?,
        })
    };
    simulation.wait_started(PATIENCE, &is_interrupted).map_err(failed)?;
    let joined = traffic(start.elapsed())?;
    simulation.finish(PATIENCE, &is_interrupted).map_err(failed)?;
    let ended = traffic(start.elapsed())?;
    Ok(Row { nodes, joined, ended, server_cpu: server.cpu_time() })
}

/// Requests that clients have sent, without the answers to questions about the server itself.
fn requests(facts: &Facts) -> u64 {
    facts.operations.values().sum()
}

pub(crate) fn table(rows: &[Row]) -> String {
    let header = [
        "nodes",
        "all joined",
        "requests/node",
        "bytes",
        "states",
        "job ended",
        "bytes",
        "states",
        "server CPU",
    ];
    let mut lines = vec![header.map(String::from).to_vec()];
    for Row { nodes, joined, ended, server_cpu } in rows {
        let per_node = joined.requests as f64 / *nodes as f64;
        let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
        lines.push(vec![
            nodes.to_string(),
            seconds(joined.time),
            format!("{per_node:.1}"),
            megabytes(joined.bytes),
            joined.states.to_string(),
            seconds(ended.time),
            megabytes(ended.bytes),
            ended.states.to_string(),
            server_cpu.map_or("-".into(), seconds),
        ]);
    }
    align(&lines)
        + "\nTimes are from the start of the first node. `all joined`: all nodes were asked to start their ranks. `job \
           ended`:\nall nodes know that it succeeded. `bytes` are those that the server received and sent, `states` how \
           often the\nstate of the job has changed.\n"
}

fn megabytes(bytes: u64) -> String {
    format!("{:.2} MB", bytes as f64 / 1e6)
}

pub(crate) fn json_rows(rows: &[Row]) -> String {
    let traffic = |traffic: &Traffic| {
        json!({
            "seconds": traffic.time.as_secs_f64(),
            "requests": traffic.requests,
            "bytes": traffic.bytes,
            "states": traffic.states,
        })
    };
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            json!({
                "op": "rendezvous",
                "nodes": row.nodes,
                "joined": traffic(&row.joined),
                "ended": traffic(&row.ended),
                "server_cpu_seconds": row.server_cpu.map(|time| time.as_secs_f64()),
            })
        })
        .collect();
    format!("{:#}\n", serde_json::Value::from(rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_what_joining_costs_and_what_the_whole_job_costs() {
        let traffic = |seconds, requests, bytes, states| Traffic {
            time: Duration::from_secs_f64(seconds),
            requests,
            bytes,
            states,
        };
        let row = Row {
            nodes: 100,
            joined: traffic(0.25, 950, 1_234_567, 9),
            ended: traffic(0.5, 1400, 2_000_000, 14),
            server_cpu: None,
        };
        let expected = [
            "nodes  all joined  requests/node    bytes  states  job ended    bytes  states  server CPU",
            "100        0.25 s            9.5  1.23 MB       9     0.50 s  2.00 MB      14           -",
        ];
        assert_eq!(table(std::slice::from_ref(&row)).lines().take(2).collect::<Vec<_>>(), expected);
        let rows: serde_json::Value = serde_json::from_str(&json_rows(&[row])).expect("it is JSON");
        assert_eq!((&rows[0]["joined"]["requests"], &rows[0]["ended"]["states"]), (&json!(950), &json!(14)));
    }
}
