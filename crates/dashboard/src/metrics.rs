//! The same facts for Prometheus: its text format, version 0.0.4.

use tenfold_base::Exposition;
use tenfold_store::Facts;

use super::runs::{NodeStatus, Run};

/// The states of a rank. Zero is reported too: an alert on `missing` needs a number.
const RANK_STATES: [&str; 4] = ["running", "stopped", "ended", "missing"];

/// The resources of the process that hosts the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) memory_bytes: u64,
    pub(super) cpu_seconds: f64,
}

pub(super) fn page(facts: &Facts, process: &Process, runs: &[Run]) -> String {
    let mut page = Exposition::default();
    store(&mut page, facts);
    page.gauge("tenfold_build_info", "Version of tenfold; the number is always 1.");
    page.labelled(&[("version", &env!("CARGO_PKG_VERSION"))], 1);
    page.gauge("process_resident_memory_bytes", "Memory of the process that hosts the store.");
    page.number(process.memory_bytes);
    page.counter("process_cpu_seconds_total", "Processor time of the process that hosts the store.");
    page.number(process.cpu_seconds);
    jobs(&mut page, runs);
    page.into_text()
}

fn store(page: &mut Exposition, facts: &Facts) {
    page.counter("tenfold_store_operations_total", "Operations that were served.");
    for (operation, count) in &facts.operations {
        page.labelled(&[("operation", operation)], count);
    }
    page.counter("tenfold_store_closed_total", "Connections that the server closed.");
    for (reason, count) in &facts.closed {
        // The same name as in JSON.
        let reason = serde_json::to_value(reason).unwrap_or_default();
        page.labelled(&[("reason", &reason.as_str().unwrap_or("other"))], count);
    }
    let counters = [
        ("tenfold_store_accepted_total", "Connections that were accepted.", facts.accepted),
        ("tenfold_store_bytes_in_total", "Bytes read from clients.", facts.bytes_in),
        ("tenfold_store_bytes_out_total", "Bytes written to clients.", facts.bytes_out),
    ];
    for (name, help, count) in counters {
        page.counter(name, help);
        page.number(count);
    }
    let memory = facts.table_bytes + facts.buffer_bytes;
    let gauges = [
        ("tenfold_store_connections", "Clients that are connected.", facts.connections),
        ("tenfold_store_connections_max", "Clients that may be connected.", facts.connections_max),
        ("tenfold_store_keys", "Keys in the store.", facts.keys),
        ("tenfold_store_keys_max", "Keys that the store may hold.", facts.keys_max),
        ("tenfold_store_queue_items", "Items in all queues.", facts.queue_items),
        ("tenfold_store_queue_items_max", "Items that all queues may hold.", facts.queue_items_max),
        ("tenfold_store_memory_bytes", "Bytes of keys, values, queues and buffers.", memory),
        ("tenfold_store_memory_max_bytes", "Limit of tenfold_store_memory_bytes.", facts.memory_max),
        ("tenfold_store_waiters", "Clients that wait for a key.", facts.waiters_count),
    ];
    for (name, help, level) in gauges {
        page.gauge(name, help);
        page.number(level);
    }
    page.gauge("tenfold_store_oldest_wait_seconds", "Longest current wait.");
    page.number(facts.oldest_wait_seconds);
    page.gauge("tenfold_store_uptime_seconds", "Time since the server started.");
    page.number(facts.uptime_seconds);
}

fn jobs(page: &mut Exposition, runs: &[Run]) {
    if runs.is_empty() {
        return;
    }
    page.gauge("tenfold_run_ranks", "Ranks of a job by the state of their process.");
    for run in runs {
        for state in RANK_STATES {
            let count = ranks(run).filter(|rank| rank.state() == state).count();
            page.labelled(&[("run", &run.id), ("state", &state)], count);
        }
    }
    page.gauge("tenfold_run_ranks_joined", "Ranks of a job that have connected to the store.");
    for run in runs {
        page.labelled(&[("run", &run.id)], ranks(run).filter(|rank| rank.joined).count());
    }
    page.gauge("tenfold_run_ranks_stuck", "Ranks of a job that are stopped, or wait in the store for long.");
    for run in runs {
        page.labelled(&[("run", &run.id)], ranks(run).filter(|rank| rank.stuck).count());
    }
    page.gauge("tenfold_run_nodes", "Nodes of a job.");
    for run in runs {
        for status in NodeStatus::ALL {
            let count = run.nodes.iter().filter(|node| node.status == status).count();
            page.labelled(&[("run", &run.id), ("status", &status.name())], count);
        }
    }
    page.gauge("tenfold_run_round", "Number of the round: how often the ranks were restarted.");
    for run in runs {
        page.labelled(&[("run", &run.id)], run.round());
    }
    page.gauge("tenfold_run_restarts_used", "Restarts that a job has used.");
    for run in runs {
        page.labelled(&[("run", &run.id)], run.restarts_used());
    }
}

fn ranks(run: &Run) -> impl Iterator<Item = &super::runs::Rank> {
    run.nodes.iter().flat_map(|node| &node.ranks)
}

#[cfg(test)]
mod grammar;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_what_prometheus_reads() {
        let mut facts = Facts::default();
        facts.operations = [("get".to_owned(), 7), ("compare_set".to_owned(), 1)].into();
        facts.closed = [(tenfold_store::Closed::WriteTimeout, 2)].into();
        (facts.table_bytes, facts.buffer_bytes, facts.oldest_wait_seconds) = (1000, 24, 1.5);
        let process = Process { pid: 1, memory_bytes: 4096, cpu_seconds: 0.25 };
        let text = page(&facts, &process, &[]);
        let metrics = grammar::parse(&text).unwrap();
        let number = |name: &str, labels: &[(&str, &str)]| grammar::number(&metrics, name, labels);
        assert_eq!(number("tenfold_store_operations_total", &[("operation", "get")]), Some(7.0));
        assert_eq!(number("tenfold_store_closed_total", &[("reason", "write_timeout")]), Some(2.0));
        assert_eq!(number("tenfold_store_memory_bytes", &[]), Some(1024.0));
        assert_eq!(number("tenfold_store_oldest_wait_seconds", &[]), Some(1.5));
        assert_eq!(number("process_cpu_seconds_total", &[]), Some(0.25));
        assert!(!text.contains("tenfold_run_"), "no job, no metrics of jobs");
    }

    #[test]
    fn a_job_may_have_any_name() {
        let name = "a\"b\\c\nd{}, \u{e4}";
        let run = super::super::runs::unreadable(name);
        let text = page(&Facts::default(), &Process::default(), &[run]);
        let metrics = grammar::parse(&text).unwrap();
        let missing = grammar::number(&metrics, "tenfold_run_ranks", &[("run", name), ("state", "missing")]);
        assert_eq!(missing, Some(0.0));
    }
}
