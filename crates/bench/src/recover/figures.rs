//! From what survivors report to the figures of a table, and of `--json`.
//!
//! A round counts as its slowest survivor took it. A round in which one of them did not recover has no end, and
//! neither has the median if that happens in half of the rounds.

use std::fmt;

use super::super::collectives::operation::{Crew, Transport};
use super::super::report::{align, median};
use super::contender::Implementation;
use super::protocol::Answer;

/// What a survivor sent after the death.
#[derive(Clone, Debug)]
pub(crate) struct Heard {
    pub(crate) rank: usize,
    /// None if it stayed silent.
    pub(crate) answer: Option<Result<Answer, String>>,
}

/// Milliseconds from the death of a rank; infinite if it never happened.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Round {
    /// Until the last survivor had an error.
    pub(crate) error_ms: f64,
    /// Until the last survivor had completed an all-reduce with all others.
    pub(crate) done_ms: f64,
    /// Why one did not.
    pub(crate) reason: Option<String>,
    /// A survivor has a result that cannot be right.
    pub(crate) is_wrong: bool,
}

impl Round {
    pub(crate) fn judge(victim: usize, killed_ns: u64, ranks: usize, heard: Vec<Heard>) -> Round {
        let survivors = ((1_u64 << ranks) - 1) & !(1 << victim);
        let mut round = Round { error_ms: 0.0, done_ms: 0.0, reason: None, is_wrong: false };
        // A survivor that died as well explains what the others have.
        let gone = heard.iter().find_map(|heard| match &heard.answer {
            Some(Err(reason)) => Some(format!("rank {}: {reason}", heard.rank)),
            _ => None,
        });
        for Heard { rank, answer } in heard {
            let since = |ns: u64| ns.saturating_sub(killed_ns) as f64 / 1e6;
            let never = f64::INFINITY;
            let (error_ms, done_ms, reason) = match answer {
                Some(Ok(Answer::Recovered { error_ns, done_ns, sum })) if sum == survivors => {
                    (since(error_ns), since(done_ns), None)
                }
                Some(Ok(Answer::Recovered { error_ns, sum, .. })) => {
                    round.is_wrong = true;
                    let reason =
                        format!("its sum is that of ranks {} instead of {}", list(sum), list(survivors));
                    (since(error_ns), never, Some(reason))
                }
                Some(Ok(Answer::Wrong(reason))) => {
                    round.is_wrong = true;
                    (never, never, Some(format!("wrong result: {reason}")))
                }
                Some(Ok(Answer::Failed { error_ns, reason })) => (since(error_ns), never, Some(reason)),
                Some(Ok(other)) => (never, never, Some(format!("it sent {other:?}"))),
                Some(Err(reason)) => (never, never, Some(reason)),
                None => (never, never, Some("no answer".into())),
            };
            round.error_ms = round.error_ms.max(error_ms);
            round.done_ms = round.done_ms.max(done_ms);
            round.reason = round.reason.or(reason.map(|reason| format!("rank {rank}: {reason}")));
        }
        round.is_wrong &= gone.is_none();
        round.reason = gone.or(round.reason);
        round
    }
}

/// The ranks whose powers of two make this sum.
fn list(sum: u64) -> String {
    let ranks = (0..u64::BITS).filter(|rank| sum & 1 << rank != 0).map(|rank| rank.to_string());
    ranks.collect::<Vec<_>>().join(", ")
}

/// Which rank is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Victim {
    /// The one that hosts the store
    Store,
    /// Another one in each round, while the store survives
    Other,
}

impl Victim {
    /// Who it is in this round: the store's host is rank 0.
    pub(crate) fn rank(self, round: usize, ranks: usize) -> usize {
        match self {
            Victim::Store => 0,
            Victim::Other => ranks - 1 - round % (ranks - 1),
        }
    }
}

impl fmt::Display for Victim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Victim::Store => "the store's host",
            Victim::Other => "another rank",
        })
    }
}

/// What all implementations of one row have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) crew: Crew,
    pub(crate) transport: Transport,
    pub(crate) victim: Victim,
}

/// All rounds of one implementation.
#[derive(Clone, Debug)]
pub(crate) struct Column {
    pub(crate) implementation: Implementation,
    pub(crate) transport: Transport,
    /// None if it was not measured.
    pub(crate) rounds: Vec<Round>,
}

impl Column {
    fn figures(&self, of: impl Fn(&Round) -> f64) -> Vec<f64> {
        self.rounds.iter().map(of).collect()
    }

    fn error_ms(&self) -> f64 {
        middle(self.figures(|round| round.error_ms))
    }

    fn median_ms(&self) -> f64 {
        middle(self.figures(|round| round.done_ms))
    }

    fn max_ms(&self) -> f64 {
        self.figures(|round| round.done_ms).into_iter().fold(f64::NAN, f64::max)
    }

    fn recovered(&self) -> usize {
        self.rounds.iter().filter(|round| round.done_ms.is_finite()).count()
    }

    /// How many times longer than ours it takes.
    fn ratio_to(&self, ours: &Column) -> Option<f64> {
        let pairs = self.rounds.iter().zip(&ours.rounds);
        let ratio = middle(pairs.map(|(theirs, ours)| theirs.done_ms / ours.done_ms).collect());
        (self.implementation != ours.implementation && ratio.is_finite()).then_some(ratio)
    }
}

/// As `median`, also if some figures are infinite.
fn middle(figures: Vec<f64>) -> f64 {
    let infinite = figures.iter().filter(|figure| figure.is_infinite()).count();
    if infinite > 0 && 2 * infinite >= figures.len() { f64::INFINITY } else { median(figures) }
}

/// One case, for all implementations; ours is the first.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) case: Case,
    pub(crate) columns: Vec<Column>,
}

pub(crate) fn table(rows: &[Row]) -> String {
    let header = [
        "ranks",
        "killed",
        "implementation",
        "transport",
        "recovered",
        "error",
        "median",
        "maximum",
        "ratio",
    ];
    let mut lines = vec![header.map(str::to_owned).to_vec()];
    for Row { case, columns } in rows {
        for column in columns {
            let ratio = column.ratio_to(&columns[0]).map_or("–".into(), |ratio| format!("{ratio:.1}×"));
            let recovered = match column.rounds.len() {
                0 => "–".into(),
                rounds => format!("{} of {rounds}", column.recovered()),
            };
            let times = [column.error_ms(), column.median_ms(), column.max_ms()].map(show);
            let names = [case.crew.to_string(), case.victim.to_string(), column.implementation.to_string()];
            let line = names.into_iter().chain([column.transport.name().to_owned(), recovered]);
            lines.push(line.chain(times).chain([ratio]).collect());
        }
    }
    align(&lines)
}

/// `0.42 ms`, `12.3 ms`, `20.1 s`, `never`; nothing was measured if it is not a number.
fn show(ms: f64) -> String {
    match ms {
        ms if ms.is_nan() => "–".into(),
        ms if ms.is_infinite() => "never".into(),
        ..10.0 => format!("{ms:.2} ms"),
        ..100.0 => format!("{ms:.1} ms"),
        ..1000.0 => format!("{ms:.0} ms"),
        _ => format!("{:.2} s", ms / 1e3),
    }
}

/// One implementation in one case, for `--json`.
#[derive(Debug, serde::Serialize)]
struct JsonRow {
    op: &'static str,
    ranks: usize,
    /// One if the ranks share this machine.
    hosts: usize,
    implementation: Implementation,
    transport: Transport,
    victim: Victim,
    rounds: usize,
    recovered: usize,
    /// Null if it never happened, or was not measured; the others likewise.
    error_us: Option<f64>,
    median_us: Option<f64>,
    max_us: Option<f64>,
    /// Of each round.
    all_us: Vec<Option<f64>>,
    /// How many times longer than tenfold's; not on tenfold's own rows.
    ratio: Option<f64>,
}

pub(crate) fn json(rows: &[Row]) -> String {
    let finite_us = |ms: f64| (ms * 1e3).is_finite().then_some(ms * 1e3);
    let columns = rows.iter().flat_map(|row| row.columns.iter().map(move |column| (row, column)));
    let list: Vec<JsonRow> = columns
        .map(|(Row { case, columns }, column)| JsonRow {
            op: "recover",
            ranks: case.crew.ranks(),
            hosts: case.crew.hosts(),
            implementation: column.implementation,
            transport: column.transport,
            victim: case.victim,
            rounds: column.rounds.len(),
            recovered: column.recovered(),
            error_us: finite_us(column.error_ms()),
            median_us: finite_us(column.median_ms()),
            max_us: finite_us(column.max_ms()),
            all_us: column.rounds.iter().map(|round| finite_us(round.done_ms)).collect(),
            ratio: column.ratio_to(&columns[0]),
        })
        .collect();
    let mut text = serde_json::to_string_pretty(&list).expect("numbers and names can be written as JSON");
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn recovered(rank: usize, error_ms: u64, done_ms: u64, sum: u64) -> Heard {
        let answer =
            Answer::Recovered { error_ns: (100 + error_ms) * MS, done_ns: (100 + done_ms) * MS, sum };
        Heard { rank, answer: Some(Ok(answer)) }
    }

    fn judge(heard: Vec<Heard>) -> Round {
        Round::judge(1, 100 * MS, 3, heard)
    }

    #[test]
    fn a_round_lasts_until_the_last_survivor_has_recovered() {
        let round = judge(vec![recovered(0, 2, 9, 0b101), recovered(2, 5, 8, 0b101)]);
        assert_eq!(round, Round { error_ms: 5.0, done_ms: 9.0, reason: None, is_wrong: false });
    }

    #[test]
    fn a_survivor_that_does_not_recover_leaves_the_round_without_an_end() {
        let failed = Answer::Failed { error_ns: 107 * MS, reason: "no store".into() };
        let heard = |answer| vec![recovered(0, 2, 9, 0b101), Heard { rank: 2, answer }];
        let round = judge(heard(Some(Ok(failed))));
        let reason = Some("rank 2: no store".to_owned());
        assert_eq!(round, Round { error_ms: 7.0, done_ms: f64::INFINITY, reason, is_wrong: false });
        let silent = judge(heard(None));
        assert_eq!((silent.error_ms, silent.reason), (f64::INFINITY, Some("rank 2: no answer".into())));
        let gone = judge(heard(Some(Err("it closed its connection".into()))));
        assert_eq!(gone.reason.as_deref(), Some("rank 2: it closed its connection"));
    }

    #[test]
    fn a_sum_without_a_survivor_or_with_the_dead_rank_is_wrong() {
        for (sum, ranks) in [(0b001, "0"), (0b111, "0, 1, 2"), (0b100, "2")] {
            let round = judge(vec![recovered(0, 2, 9, 0b101), recovered(2, 5, 8, sum)]);
            assert!(round.is_wrong && round.done_ms.is_infinite() && round.error_ms == 5.0, "{round:?}");
            let reason = format!("rank 2: its sum is that of ranks {ranks} instead of 0, 2");
            assert_eq!(round.reason, Some(reason));
        }
        let gone = Heard { rank: 2, answer: Some(Err("it closed its connection".into())) };
        let round = judge(vec![recovered(0, 2, 9, 0b001), gone]);
        assert_eq!((round.is_wrong, round.reason), (false, Some("rank 2: it closed its connection".into())));
        let round = judge(vec![Heard { rank: 0, answer: Some(Ok(Answer::Wrong("it has 3".into()))) }]);
        assert_eq!((round.is_wrong, round.reason), (true, Some("rank 0: wrong result: it has 3".into())));
    }

    #[test]
    fn another_rank_dies_in_each_round_and_never_the_first() {
        let victims = |victim: Victim| (0..5).map(|round| victim.rank(round, 4)).collect::<Vec<_>>();
        assert_eq!(victims(Victim::Other), [3, 2, 1, 3, 2]);
        assert_eq!(victims(Victim::Store), [0; 5]);
    }

    fn column(implementation: Implementation, done_ms: &[f64]) -> Column {
        let round = |done_ms: &f64| Round {
            error_ms: done_ms.min(4.0),
            done_ms: *done_ms,
            reason: None,
            is_wrong: false,
        };
        Column { implementation, transport: Transport::Shm, rounds: done_ms.iter().map(round).collect() }
    }

    #[test]
    fn half_of_the_rounds_without_recovery_is_never() {
        let never = f64::INFINITY;
        assert_eq!(middle(vec![1.0, never, 3.0]), 3.0);
        assert_eq!(middle(vec![1.0, never]), never);
        assert_eq!(middle(vec![1.0, 2.0, 3.0, never]), 2.5);
        assert!(middle(vec![]).is_nan());
        let column = column(Implementation::Gloo, &[1.0, never, 3.0]);
        assert_eq!((column.recovered(), column.max_ms()), (2, never));
    }

    #[test]
    fn a_ratio_is_taken_within_rounds() {
        let ours = column(Implementation::Tenfold, &[1.0, 10.0, 2.0]);
        assert_eq!(column(Implementation::Ulfm, &[3.0, 20.0, 2.0]).ratio_to(&ours), Some(2.0));
        assert_eq!(column(Implementation::Gloo, &[f64::INFINITY; 3]).ratio_to(&ours), None);
        assert_eq!(ours.ratio_to(&ours), None);
    }

    fn row() -> Row {
        let case = Case { crew: Crew::Machine(4), transport: Transport::Shm, victim: Victim::Store };
        let columns = vec![
            column(Implementation::Tenfold, &[2.0, 4.0, 3.0]),
            column(Implementation::Gloo, &[f64::INFINITY; 3]),
            column(Implementation::Ulfm, &[]),
        ];
        Row { case, columns }
    }

    #[test]
    fn a_table_says_never_and_shows_what_was_not_measured() {
        assert_eq!(
            table(&[row()]),
            [
                "ranks              killed  implementation  transport  recovered    error   median  maximum  ratio\n",
                "4 ranks  the store's host         tenfold        shm     3 of 3  3.00 ms  3.00 ms  4.00 ms      –\n",
                "4 ranks  the store's host            gloo        shm     0 of 3  4.00 ms    never    never      –\n",
                "4 ranks  the store's host            ulfm        shm          –        –        –        –      –\n",
            ]
            .concat()
        );
        let shown = [(0.421, "0.42 ms"), (12.34, "12.3 ms"), (345.6, "346 ms"), (20_014.0, "20.01 s")];
        shown.into_iter().for_each(|(ms, text)| assert_eq!(show(ms), text));
    }

    #[test]
    fn a_program_can_read_the_rows() {
        let rows: serde_json::Value = serde_json::from_str(&json(&[row()])).unwrap();
        assert_eq!((&rows[0]["median_us"], &rows[0]["victim"]), (&3000.0.into(), &"store".into()));
        assert_eq!(rows[0]["all_us"], serde_json::json!([2000.0, 4000.0, 3000.0]));
        assert_eq!((&rows[0]["recovered"], &rows[0]["ratio"]), (&3.into(), &serde_json::Value::Null));
        assert_eq!((&rows[1]["median_us"], &rows[1]["error_us"]), (&serde_json::Value::Null, &4000.0.into()));
        assert_eq!((&rows[2]["rounds"], &rows[2]["max_us"]), (&0.into(), &serde_json::Value::Null));
    }
}
