//! Messages without a partner, and partners that do not match.

use super::super::align::{Group, Job, Standing};
use super::super::dump::{End, Record, Shape};
use super::super::words;
use super::{Finding, Kind, Level, Waiting, failed, last_words};

/// Pairs of ranks that are reported.
const PAIRS_MAX: usize = 4;

pub(super) fn find(job: &Job<'_>, group: &Group<'_>) -> Vec<Finding> {
    let pairs: std::collections::BTreeSet<(u32, u32)> = group
        .sends
        .keys()
        .copied()
        .chain(group.receives.keys().filter_map(|&(source, target)| Some((source?, target))))
        .collect();
    let mut findings = Vec::new();
    for (source, target) in pairs {
        if !is_dumped(job, source) || !is_dumped(job, target) || findings.len() >= PAIRS_MAX {
            continue;
        }
        findings.extend(pair(job, group, source, target));
    }
    for (&(source, target), receives) in &group.receives {
        if source.is_none() {
            findings.extend(from_any(job, group, target, receives));
        }
    }
    findings
}

fn is_dumped(job: &Job<'_>, rank: u32) -> bool {
    job.dump(rank).is_some()
}

/// Does the rank's ring still hold its first record?
fn is_whole(job: &Job<'_>, rank: u32) -> bool {
    job.dump(rank).is_some_and(|dump| dump.records.first().is_none_or(|record| record.id == 0))
}

/// Messages from one rank to another are in order: the n-th that is sent is the n-th that is received.
fn pair(job: &Job<'_>, group: &Group<'_>, source: u32, target: u32) -> Option<Finding> {
    let mut sends = group.sends.get(&(source, target)).cloned().unwrap_or_default();
    let mut receives = group.receives.get(&(Some(source), target)).cloned().unwrap_or_default();
    if !is_whole(job, source) || !is_whole(job, target) {
        // Earlier messages are lost on one side or both: only those in progress can be known to lack a
        // partner.
        sends.retain(|record| record.end == End::Open);
        receives.retain(|record| record.end == End::Open);
    } else if let Some(finding) = misfit(group, source, target, &sends, &receives) {
        return Some(finding);
    }
    let takes_any = group.receives.get(&(None, target)).map_or(0, Vec::len);
    let paired = sends.len().min(receives.len());
    if let Some(send) = sends.get(paired + takes_any) {
        let count = sends.len() - paired - takes_any;
        let what = format!("rank {source} sends to rank {target}, which does not receive");
        return Some(alone(job, group, (source, send), Some(target), count, what));
    }
    let receive = receives.get(paired)?;
    let what = format!("rank {target} receives from rank {source}, which does not send");
    Some(alone(job, group, (target, receive), Some(source), receives.len() - paired, what))
}

fn from_any(job: &Job<'_>, group: &Group<'_>, target: u32, receives: &[&Record]) -> Option<Finding> {
    let everybody = group.everyone.iter().all(|&rank| is_dumped(job, rank) && is_whole(job, rank));
    if !everybody {
        return None;
    }
    let to_target = group.sends.iter().filter(|((_, to), _)| *to == target);
    let spare: usize = to_target
        .map(|(&(from, _), sends)| {
            sends.len().saturating_sub(group.receives.get(&(Some(from), target)).map_or(0, Vec::len))
        })
        .sum();
    let receive = receives.get(spare)?;
    let what = format!("rank {target} receives from any rank, but no rank sends to it");
    Some(alone(job, group, (target, receive), None, receives.len() - spare, what))
}

/// The first message without a partner of one kind, and how many there are.
fn alone(
    job: &Job<'_>,
    group: &Group<'_>,
    (rank, record): (u32, &Record),
    peer: Option<u32>,
    count: usize,
    what: String,
) -> Finding {
    let waiting = Waiting::new(job, &[(rank, record)]);
    let headline = format!("{what} ({})", group.title);
    let mut finding = Finding::new(Kind::NoPartner, headline).of(group, None);
    finding.ranks = peer.into_iter().collect();
    let more = match count {
        0 | 1 => String::new(),
        count => format!("; {} more follow", count - 1),
    };
    finding.lines.push(format!("{}, {}{more}", waiting.text, words::tensors(record, None)));
    if let Some(peer) = peer {
        let last = job.dump(peer).and_then(|dump| dump.records.last());
        match (job.standing(group, peer), last) {
            (Standing::NoDump, _) | (_, None) => {
                finding.lines.push(format!("rank {peer} has recorded no call at all"));
            }
            _ => finding.lines.extend(last_words(job, group, peer)),
        }
    }
    if record.is_completed() {
        finding.level = Level::Note; // it was sent without a receiver, and its sender continued
    } else if waiting.is_short() {
        finding.level = Level::Note;
        finding.lines.push("this is so short that it may still arrive".into());
    } else if peer.is_some_and(|peer| failed::Excuses::new(job, group, &[(rank, record)]).has(peer)) {
        finding.level = Level::Note;
        finding.is_consequence = true;
        finding.lines.push("the group had failed by then".into());
    } else {
        finding.waiting = vec![rank];
        finding.lines.extend(failed::line(job, group));
    }
    finding
}

/// The first message that does not match what its receiver expects.
fn misfit(
    group: &Group<'_>,
    source: u32,
    target: u32,
    sends: &[&Record],
    receives: &[&Record],
) -> Option<Finding> {
    let elements = |shapes: &[Shape]| shapes.iter().map(Shape::elements).sum::<i128>();
    let dtypes = |shapes: &[Shape]| shapes.iter().map(|shape| shape.dtype.clone()).collect::<Vec<_>>();
    let fits = |(send, receive): &(&&Record, &&Record)| {
        elements(&send.inputs) == elements(&receive.outputs)
            && dtypes(&send.inputs) == dtypes(&receive.outputs)
    };
    let number = sends.iter().zip(receives).position(|both| !fits(&both))?;
    let (send, receive) = (sends[number], receives[number]);
    let headline = format!(
        "rank {target} receives a different tensor than rank {source} sends: message {} between them ({})",
        number + 1,
        group.title
    );
    let mut finding = Finding::new(Kind::OtherCall, headline).of(group, None);
    let line = |rank: u32, verb: &str, record: &Record| {
        let site = words::call_site(record).map(|site| format!(", called at {site}")).unwrap_or_default();
        format!("rank {rank} {verb} {}{site}", words::tensors(record, None))
    };
    finding.lines = vec![line(source, "sends", send), line(target, "receives", receive)];
    finding.ranks = vec![source, target];
    Some(finding)
}
