//! The verdict as text and as JSON.

use serde_json::{Value, json};
use tenfold_console::one_line;

use super::align::{Group, Job};
use super::dump::End;
use super::read::Refusal;
use super::verdict::{Finding, Level};
use super::words;

/// The results of the analysis.
pub(crate) struct Report<'a> {
    pub(crate) job: &'a Job<'a>,
    pub(crate) findings: &'a [Finding],
    pub(crate) refusals: &'a [Refusal],
    /// Files beside the dumps whose names have no rank.
    pub(crate) left_out: usize,
}

/// Letters with terminal colours, or without.
struct Paint {
    is_on: bool,
}

impl Paint {
    fn red(&self, text: &str) -> String {
        self.wrap("\x1b[1;31m", text)
    }

    fn green(&self, text: &str) -> String {
        self.wrap("\x1b[1;32m", text)
    }

    fn yellow(&self, text: &str) -> String {
        self.wrap("\x1b[1;33m", text)
    }

    fn dim(&self, text: &str) -> String {
        self.wrap("\x1b[2m", text)
    }

    fn wrap(&self, start: &str, text: &str) -> String {
        if self.is_on { format!("{start}{text}\x1b[0m") } else { text.to_owned() }
    }
}

impl Report<'_> {
    pub(crate) fn is_bad(&self) -> bool {
        self.findings.iter().any(|finding| finding.level == Level::Bad)
    }

    /// One sentence: the first finding's, or that there is none.
    pub(crate) fn verdict(&self) -> String {
        match self.findings.iter().find(|finding| finding.level == Level::Bad) {
            Some(finding) => one_line(&finding.headline),
            None => self.all_well(),
        }
    }

    fn all_well(&self) -> String {
        let records: usize = self.job.dumps.iter().map(|dump| dump.records.len()).sum();
        if records == 0 {
            return "no operations were recorded".into();
        }
        let active = self.job.groups.iter().filter(|group| !group.rows.is_empty());
        let busiest = active.max_by_key(|group| group.rows.len());
        let place = busiest.and_then(|group| {
            let title = group.rows.values().next_back()?.values().next()?.last()?.title();
            Some(format!(": all ranks have reached {title} of {}", group.title))
        });
        let blind =
            self.job.dumps.iter().flat_map(|dump| &dump.records).any(|record| record.end == End::Unknown);
        let caveat = if blind { "; whether it completed is not recorded" } else { "" };
        format!("no problem found{}{caveat}", place.unwrap_or_default())
    }

    /// One screen: what went wrong, on which ranks, and what the verdict is based on.
    pub(crate) fn text(&self, limit: usize, colour: bool) -> String {
        let paint = Paint { is_on: colour };
        let mut lines = Vec::new();
        if !self.is_bad() {
            lines.push(format!("{} {}", paint.green("✓"), one_line(&self.all_well())));
        }
        for finding in self.findings.iter().take(limit) {
            let (mark, headline) = match finding.level {
                Level::Bad => (paint.red("✗"), paint.red(&one_line(&finding.headline))),
                Level::Note => (paint.yellow("!"), one_line(&finding.headline)),
            };
            let follows = if finding.is_consequence { " (follows from the above)" } else { "" };
            lines.push(format!("{mark} {headline}{follows}"));
            lines.extend(finding.lines.iter().map(|line| format!("    {}", one_line(line))));
        }
        let more = self.findings.len().saturating_sub(limit);
        if more > 0 {
            lines.push(format!(
                "  and {}: see them with --limit {}",
                words::counted(more, "more finding"),
                self.findings.len()
            ));
        }
        lines.push(paint.dim(&self.basis()));
        lines.join("\n") + "\n"
    }

    /// What the verdict is based on.
    fn basis(&self) -> String {
        let job = self.job;
        let mut versions: Vec<&str> = job.dumps.iter().map(|dump| &*dump.version).collect();
        versions.sort_unstable();
        versions.dedup();
        let collectives: usize = job.groups.iter().map(|group| group.rows.len()).sum();
        let messages: usize = job.groups.iter().map(Group::messages).sum();
        let mut text = format!(
            "{} (format {}), {}, {}",
            words::counted(job.dumps.len(), "dump"),
            one_line(&versions.join(" and ")),
            words::counted(job.groups.len(), "group"),
            words::counted(collectives, "collective")
        );
        if messages > 0 {
            text += &format!(", {}", words::counted(messages, "message call"));
        }
        if !self.refusals.is_empty() {
            text += &format!("; {} not read", words::counted(self.refusals.len(), "file"));
        }
        if self.left_out > 0 {
            text += &format!("; {} ignored (no rank in the name)", words::counted(self.left_out, "file"));
        }
        text
    }

    pub(crate) fn json(&self) -> Value {
        let findings: Vec<Value> = self.findings.iter().map(finding_json).collect();
        let dumps = self.job.dumps.iter().map(|dump| {
            json!({
                "rank": dump.rank, "file": dump.file, "version": dump.version, "host": dump.host.as_deref(),
                "operations": dump.records.len(), "written_ns": dump.written_ns,
            })
        });
        let refused =
            self.refusals.iter().map(|refusal| json!({"file": refusal.file, "problem": refusal.problem}));
        json!({
            "verdict": self.verdict(),
            "level": if self.is_bad() { "bad" } else { "ok" },
            "findings": findings,
            "ranks_missing": self.job.missing,
            "groups": self.job.groups.iter().map(|group| self.group_json(group)).collect::<Vec<_>>(),
            "dumps": dumps.collect::<Vec<_>>(),
            "refused": refused.collect::<Vec<_>>(),
            "files_left_out": self.left_out,
        })
    }

    fn group_json(&self, group: &Group<'_>) -> Value {
        let ranks = group.members.iter().map(|&rank| {
            let last = group.last(rank);
            json!({
                "rank": rank,
                "last_entered": last.map(|record| record.sequence),
                "last_operation": last.map(|record| &*record.operation),
                "last_completed": group.rows.iter().rev().find(|(_, row)| {
                    row.get(rank).and_then(|records| records.last()).is_some_and(|record| record.is_completed())
                }).map(|(sequence, _)| *sequence),
            })
        });
        json!({
            "name": &*group.name,
            "title": group.title,
            "ranks_known": group.members_known,
            "collectives": group.rows.len(),
            "messages": group.messages(),
            "ranks": ranks.collect::<Vec<_>>(),
        })
    }
}

fn finding_json(finding: &Finding) -> Value {
    json!({
        "kind": finding.kind.name(),
        "level": if finding.level == Level::Bad { "bad" } else { "note" },
        "text": finding.headline,
        "details": finding.lines,
        "ranks": finding.ranks,
        "waiting": finding.waiting,
        "group": finding.group,
        "sequence": finding.sequence,
        "is_consequence": finding.is_consequence,
    })
}
