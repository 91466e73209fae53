//! One scenario for each rule.

use tenfold_dashboard::job::{Ending, Head, Phase, Stamp, pages_for, parse_page};

use super::member::{Member, What, Wish};
use super::state::{PAGE_TEXT_MAX, State, first_head, head_text, parse_head, taken_over};
use super::*;

pub(super) fn settings(nodes_min: usize, nodes_max: usize) -> Settings {
    Settings {
        run_id: "job".into(),
        nodes_min,
        nodes_max,
        max_restarts: 3,
        join_timeout: Duration::from_secs(600),
        last_call: Duration::from_secs(30),
        beat_interval: Duration::from_secs(5),
        beats_missed_max: 3,
    }
}

pub(super) fn node(id: &str) -> NodeInfo {
    let (id, host, role) = (id.into(), id.into(), "default".into());
    NodeInfo { id, host, ranks: 1, role, fixed_rank: None, worker_store: None }
}

pub(super) fn failure(round: u64, host: &str, rank: usize) -> JobFailure {
    let (host, summary, text) = (host.into(), "exit code 3".into(), "exit code 3\n  | oh no".into());
    JobFailure { round, node_rank: rank, host, rank, summary, text, replaced: 0 }
}

/// A state with these nodes, of which the first is the folder.
pub(super) fn state_of(settings: &Settings, ids: &[&str]) -> State {
    let mut state = State::of_head(first_head(settings, ids[0]));
    change(&mut state, |state| ids.iter().for_each(|id| state.join(&node(id))));
    state
}

/// Changes a state as its folder does.
pub(super) fn change(state: &mut State, change: impl FnOnce(&mut State)) {
    let before = state.clone();
    change(state);
    state.seal(&before, Stamp(state.term, state.version));
}

/// Members around one state, which read it in turn; nothing is lost or late.
struct Job {
    settings: Settings,
    state: Option<State>,
    wishes: Vec<Wish>,
    members: Vec<Option<Member>>,
    told: Vec<Vec<String>>,
    now: Duration,
    beats: u64,
}

impl Job {
    fn new(settings: Settings) -> Job {
        Job {
            settings,
            state: None,
            wishes: Vec::new(),
            members: Vec::new(),
            told: Vec::new(),
            now: Duration::ZERO,
            beats: 0,
        }
    }

    /// With nodes `a`, `b`… that have read the state.
    fn of(nodes: usize, settings: Settings) -> Job {
        let mut job = Job::new(settings);
        for _ in 0..nodes {
            job.join();
        }
        job.turn();
        job
    }

    fn join(&mut self) {
        let id = char::from(b'a' + self.members.len() as u8).to_string();
        self.join_as(node(&id), self.settings.clone());
    }

    fn join_fixed(&mut self, rank: usize) {
        let id = char::from(b'a' + self.members.len() as u8).to_string();
        self.join_as(NodeInfo { fixed_rank: Some(rank), ..node(&id) }, self.settings.clone());
    }

    fn join_as(&mut self, node: NodeInfo, settings: Settings) {
        self.members.push(Some(Member::new(settings, node)));
        self.told.push(Vec::new());
    }

    /// All members read and write until there is nothing to change.
    fn turn(&mut self) {
        for at in (0..self.members.len()).cycle() {
            if self.members.iter().flatten().count() == 0 || !self.look(at) && !self.anybody_looks() {
                return;
            }
        }
    }

    fn anybody_looks(&mut self) -> bool {
        (0..self.members.len()).any(|at| self.look(at))
    }

    /// One member decides, and folds if that is its task; returns whether it changed something.
    fn look(&mut self, at: usize) -> bool {
        let Some(member) = &mut self.members[at] else { return false };
        let id = member.node.id.clone();
        let view = self.state.as_ref().map(|state| state.view(&id));
        let decision = member.decide(view.as_ref(), self.now);
        self.told[at].extend(decision.events.iter().map(|event| show(event, self.state.as_ref())));
        let mut changed = !decision.events.is_empty();
        if let Some(claim) = decision.claim {
            self.state = Some(match self.state.take() {
                Some(state) if state.job == claim.job => State { head: claim, ..state },
                _ => State::of_head(claim),
            });
            return true;
        }
        let Some(state) = self.state.as_ref().filter(|state| state.folder == id && !decision.finished) else {
            changed |= decision.wish.is_some();
            self.wishes.extend(decision.wish);
            return changed;
        };
        let mut wishes = Vec::from_iter(decision.wish);
        wishes.append(&mut self.wishes);
        let fold = member.fold(state, &wishes, 0, self.now);
        if let Some((next, _)) = fold.next {
            (self.state, changed) = (Some(next), true);
        }
        for (id, text) in fold.answers {
            let refused = self.members.iter_mut().flatten().find(|member| member.node.id == id);
            refused.into_iter().for_each(|member| member.refuse(text.clone()));
            changed = true;
        }
        changed
    }

    /// The state changes in a way that no member of this test has asked for.
    fn change(&mut self, what: impl FnOnce(&mut State)) {
        change(self.state.as_mut().expect("a node has joined"), what);
    }

    fn say(&mut self, at: usize, order: Order) {
        self.members[at].as_mut().expect("it is alive").obey(order);
        self.turn();
    }

    fn stopped(&mut self, at: usize, round: u64) {
        self.say(at, Order::Stopped { round });
    }

    fn done(&mut self, at: usize, round: u64) {
        self.say(at, Order::Done { round });
    }

    fn fails(&mut self, at: usize, round: u64) {
        let failure = failure(round, &node_id(at), at);
        self.say(at, Order::Failed { round, failure });
    }

    fn leaves(&mut self, at: usize) {
        self.say(at, Order::Leave { reason: "SIGTERM".into() });
    }

    fn dies(&mut self, at: usize) {
        self.members[at] = None;
    }

    /// One interval passes: live nodes beat, and all listen.
    fn interval(&mut self) {
        self.now += self.settings.beat_interval;
        self.beats += 1;
        let alive: Vec<String> =
            (0..self.members.len()).filter(|&at| self.members[at].is_some()).map(node_id).collect();
        let Some(state) = &self.state else { return };
        for member in self.members.iter_mut().flatten() {
            let folded = Some(state).filter(|state| state.folder == member.node.id);
            for id in member.listens_to(&state.view(&member.node.id), folded) {
                member.hear(&id, alive.contains(&id).then_some(self.beats), self.now);
            }
        }
        self.turn();
    }

    fn intervals(&mut self, count: u64) {
        (0..count).for_each(|_| self.interval());
    }

    /// The events of a node since the last call, without notes.
    fn told(&mut self, at: usize) -> Vec<String> {
        let mut told = std::mem::take(&mut self.told[at]);
        told.retain(|text| !text.starts_with("note"));
        told
    }

    fn notes(&self, at: usize) -> Vec<&str> {
        self.told[at].iter().filter_map(|text| text.strip_prefix("note: ")).collect()
    }

    fn state(&self) -> &State {
        self.state.as_ref().expect("a node has joined")
    }
}

fn node_id(at: usize) -> String {
    char::from(b'a' + at as u8).to_string()
}

fn show(event: &Event, state: Option<&State>) -> String {
    match event {
        Event::Start(start) => {
            let nodes = state.into_iter().flat_map(State::nodes).take(start.nodes);
            let hosts: Vec<&str> = nodes.map(|node| node.host.as_str()).collect();
            let restart = match start.restarts_used {
                0 => String::new(),
                used => format!(", restart {used}"),
            };
            format!("start {} as {} of {}{restart}", start.round, start.node_rank, hosts.join(" "))
        }
        Event::Stop { round, reason } => format!("stop {round}: {reason}"),
        Event::Over(Outcome::Success) => "success".into(),
        Event::Over(Outcome::Failed(failure)) => format!("failed: {} on {}", failure.summary, failure.host),
        Event::Over(Outcome::Closed(text)) => format!("closed: {text}"),
        Event::Note(text) => format!("note: {text}"),
        Event::Held(_) => unreachable!("members know nothing of it"),
    }
}

#[test]
fn the_first_round_starts_immediately_when_all_nodes_have_joined() {
    let mut job = Job::of(2, settings(1, 2));
    assert_eq!(job.told(0), ["start 0 as 0 of a b"]);
    assert_eq!(job.told(1), ["start 0 as 1 of a b"]);
}

#[test]
fn with_enough_nodes_the_first_round_starts_after_the_last_call() {
    let mut job = Job::of(1, settings(2, 3));
    job.join();
    job.turn();
    assert_eq!(
        job.notes(0),
        [
            "1 of 2 nodes have joined; waiting for the rest for up to 600 s",
            "2 nodes have joined; waiting for up to 1 more for 30 s"
        ]
    );
    job.intervals(5);
    assert!(job.told(0).is_empty());
    job.interval();
    assert_eq!(job.told(0), ["start 0 as 0 of a b"]);
}

#[test]
fn when_all_nodes_are_done_the_job_succeeds() {
    let mut job = Job::of(2, settings(2, 2));
    job.done(0, 0);
    assert_eq!(job.state().phase, Phase::Running);
    job.done(1, 0);
    assert_eq!(job.told(0), ["start 0 as 0 of a b", "success"]);
    assert_eq!(job.told(1), ["start 0 as 1 of a b", "success"]);
    assert!(job.state().is_settled());
}

#[test]
fn a_failure_stops_all_and_starts_them_again_with_the_same_ranks_without_last_call() {
    let mut job = Job::of(2, Settings { last_call: Duration::ZERO, ..settings(2, 3) });
    job.fails(1, 0);
    assert_eq!(job.told(0), ["start 0 as 0 of a b", "stop 0: rank 1 on node b failed: exit code 3"]);
    job.stopped(1, 0);
    assert_eq!(job.told(1), ["start 0 as 1 of a b", "stop 0: rank 1 on node b failed: exit code 3"]);
    job.stopped(0, 0);
    assert_eq!(job.told(0), ["start 1 as 0 of a b, restart 1"]);
    assert_eq!(job.told(1), ["start 1 as 1 of a b, restart 1"]);
    assert_eq!(job.state().restarts_used, 1);
}

#[test]
fn of_several_failures_in_a_round_the_first_counts() {
    let mut job = Job::of(2, settings(2, 2));
    let late = failure(0, "a", 0);
    job.members[0].as_mut().unwrap().obey(Order::Failed { round: 0, failure: late.clone() });
    job.fails(1, 0);
    job.say(0, Order::Failed { round: 0, failure: late });
    assert_eq!((job.state().round, job.state().restarts_used), (1, 1));
}

#[test]
fn orders_about_a_past_round_are_ignored() {
    let mut job = Job::of(1, settings(1, 1));
    job.fails(0, 0);
    job.stopped(0, 0);
    assert_eq!(job.told(0).last().unwrap(), "start 1 as 0 of a, restart 1");
    job.fails(0, 0);
    job.done(0, 0);
    job.stopped(0, 0);
    assert_eq!((job.state().round, job.state().phase, job.state().restarts_used), (1, Phase::Running, 1));
}

#[test]
fn processes_that_were_replaced_count_as_restarts() {
    let fails = |replaced| {
        let mut state = state_of(&settings(1, 1), &["a"]);
        change(&mut state, State::begin);
        let failure = JobFailure { replaced, ..failure(0, "a", 0) };
        change(&mut state, |state| state.fail("a", failure.clone()));
        (state.phase, state.restarts_used, state.replaced)
    };
    assert_eq!(settings(1, 1).max_restarts, 3);
    assert_eq!(fails(2), (Phase::Joining, 1, 2));
    assert_eq!(fails(3), (Phase::Over, 0, 3));
}

#[test]
fn a_failure_without_restarts_left_is_reported_to_all_nodes() {
    let mut job = Job::of(3, Settings { max_restarts: 0, ..settings(2, 2) });
    job.fails(0, 0);
    let end = ["stop 0: rank 0 on node a failed: exit code 3", "failed: exit code 3 on a"];
    assert_eq!(job.told(0)[1..], end);
    assert_eq!(job.told(1)[1..], end);
    assert_eq!(job.told(2), ["failed: exit code 3 on a"], "a spare has nothing to stop");
    assert_eq!(job.state().restarts_used, 0);
}

#[test]
fn a_failure_report_is_cut_to_size() {
    let mut job = Job::of(1, settings(1, 1));
    let long = JobFailure { text: "ä".repeat(FAILURE_TEXT_MAX), ..failure(0, "a", 0) };
    job.say(0, Order::Failed { round: 0, failure: long });
    assert_eq!(job.state().failure.as_ref().unwrap().text.len(), FAILURE_TEXT_MAX);
}

#[test]
fn after_a_failure_nodes_that_were_done_run_again() {
    let mut job = Job::of(2, settings(2, 2));
    job.done(0, 0);
    job.fails(1, 0);
    job.stopped(1, 0);
    assert_eq!(
        job.told(0),
        [
            "start 0 as 0 of a b",
            "stop 0: rank 1 on node b failed: exit code 3",
            "start 1 as 0 of a b, restart 1"
        ]
    );
    assert!(job.state().members.iter().all(|seat| !seat.done));
}

#[test]
fn a_newcomer_opens_the_next_round_where_there_is_room() {
    let mut job = Job::of(1, Settings { last_call: Duration::ZERO, ..settings(1, 2) });
    job.join();
    job.turn();
    assert_eq!(job.told(0), ["start 0 as 0 of a", "stop 0: node b joined"]);
    job.stopped(0, 0);
    assert_eq!(job.told(1), ["start 1 as 1 of a b"]);
    assert_eq!(job.state().restarts_used, 0, "it costs no restart");
}

#[test]
fn a_newcomer_does_not_disturb_a_job_that_is_about_to_end() {
    let mut job = Job::of(2, Settings { last_call: Duration::ZERO, ..settings(2, 3) });
    job.done(0, 0);
    job.join();
    job.turn();
    assert_eq!(job.notes(2), ["the job is about to end; this node waits as a spare"]);
    job.done(1, 0);
    assert_eq!(job.told(0)[1..], ["success"]);
    assert_eq!(job.told(2), ["success"]);
}

#[test]
fn without_room_a_newcomer_is_a_spare_until_a_node_leaves() {
    let mut job = Job::of(3, settings(2, 2));
    assert_eq!(job.notes(2), ["2 nodes have joined already; this node waits as a spare"]);
    job.leaves(0);
    assert_eq!(job.told(0)[1..], ["stop 0: node a left: SIGTERM", "closed: this node left the job: SIGTERM"]);
    job.stopped(1, 0);
    assert_eq!(job.told(1)[1..], ["stop 0: node a left: SIGTERM", "start 1 as 1 of c b"]);
    assert_eq!(job.told(2), ["start 1 as 0 of c b"]);
    assert_eq!(job.state().restarts_used, 0, "there are as many as before");
}

#[test]
fn ranks_are_kept_and_newcomers_fill_the_gaps_in_order_of_arrival() {
    let mut job = Job::of(4, settings(2, 4));
    job.leaves(1);
    job.leaves(2);
    job.join();
    job.join();
    job.turn();
    job.stopped(3, 0);
    job.stopped(0, 0);
    assert_eq!(job.told(3).last().unwrap(), "start 1 as 3 of a e f d");
}

#[test]
fn a_rank_that_is_too_high_for_fewer_nodes_is_given_up() {
    let mut job = Job::of(4, settings(2, 4));
    job.leaves(0);
    job.leaves(2);
    job.stopped(1, 0);
    job.stopped(3, 0);
    assert_eq!(job.told(1).last().unwrap(), "start 1 as 1 of d b");
}

#[test]
fn leaving_below_the_least_number_costs_a_restart_and_the_rest_wait() {
    let mut job = Job::of(2, settings(2, 2));
    job.leaves(0);
    job.stopped(1, 0);
    assert_eq!((job.state().round, job.state().restarts_used), (1, 1));
    job.join();
    job.turn();
    assert_eq!(job.told(1)[2..], ["start 1 as 1 of c b, restart 1"]);
}

#[test]
fn leaving_below_the_least_number_without_restarts_closes_the_job() {
    let mut job = Job::of(2, Settings { max_restarts: 0, ..settings(2, 2) });
    job.leaves(0);
    let text = "node a left: SIGTERM; 1 of at least 2 nodes are left, and all restarts are used (0)";
    assert_eq!(job.told(1)[1..], [format!("stop 0: {text}"), format!("closed: {text}")]);
}

#[test]
fn a_node_that_leaves_when_it_is_done_disturbs_no_other() {
    let mut job = Job::of(2, settings(2, 2));
    job.done(0, 0);
    job.leaves(0);
    assert_eq!(job.told(0).last().unwrap(), "closed: this node left the job: SIGTERM");
    job.done(1, 0);
    assert_eq!(job.told(1), ["start 0 as 1 of a b", "success"]);
}

#[test]
fn when_the_last_node_leaves_the_job_is_over_and_another_may_begin() {
    let mut job = Job::of(1, settings(1, 1));
    job.leaves(0);
    assert_eq!(job.state().phase, Phase::Over);
    job.join_as(node("z"), Settings { max_restarts: 7, ..settings(1, 1) });
    job.turn();
    assert_eq!(job.told(1), ["start 0 as 0 of z"]);
    assert_eq!((job.state().job, job.state().max_restarts), (1, 7));
}

#[test]
fn a_node_whose_beat_does_not_move_is_dead() {
    let mut job = Job::of(3, settings(2, 3));
    job.interval();
    job.dies(1);
    job.intervals(3);
    assert_eq!(job.told(0), ["start 0 as 0 of a b c"], "not yet");
    job.interval();
    assert_eq!(job.told(0), ["stop 0: node b sent no heartbeat for 15 s"]);
    job.stopped(0, 0);
    job.stopped(2, 0);
    assert_eq!(job.told(0), ["start 1 as 0 of a c"]);
    assert_eq!(job.state().restarts_used, 0);
}

#[test]
fn a_dead_node_that_was_done_is_not_missed() {
    let mut job = Job::of(2, settings(2, 2));
    job.done(0, 0);
    job.dies(0);
    job.intervals(10);
    job.done(1, 0);
    assert_eq!(job.told(1), ["start 0 as 1 of a b", "success"]);
}

#[test]
fn a_node_that_was_frozen_does_not_declare_others_dead() {
    let mut member = Member::new(settings(2, 2), node("a"));
    let mut state = state_of(&settings(2, 2), &["a", "b"]);
    change(&mut state, State::begin);
    let listened = member.listens_to(&state.view("a"), Some(&state));
    assert_eq!(listened, ["b"]);
    member.hear("b", Some(1), Duration::from_secs(1));
    member.hear("b", Some(1), Duration::from_secs(3600));
    assert_eq!(member.fold(&state, &[], 0, Duration::from_secs(3600)).next, None);
    // Nor does it take over from a folder that it has not listened to.
    let mut other = Member::new(settings(2, 2), node("b"));
    other.hear("a", Some(1), Duration::from_secs(1));
    other.hear("a", Some(1), Duration::from_secs(3600));
    assert_eq!(other.decide(Some(&state.view("b")), Duration::from_secs(3600)).claim, None);
}

#[test]
fn a_removed_node_stops_its_ranks_and_joins_again() {
    let mut job = Job::of(2, settings(1, 2));
    job.interval();
    let frozen = job.members[1].take();
    job.intervals(4);
    job.stopped(0, 0);
    assert_eq!(job.told(0)[2..], ["start 1 as 0 of a"]);
    job.members[1] = frozen;
    job.turn();
    let gave_up = "the others gave this node up, since it sent no heartbeat for some time; it joins again";
    assert_eq!(job.told(1), ["start 0 as 1 of a b".to_string(), format!("stop 0: {gave_up}")]);
    job.stopped(1, 0);
    assert_eq!(job.told(0), ["stop 1: node b joined"]);
    job.stopped(0, 1);
    assert_eq!(job.told(1), ["start 2 as 1 of a b"]);
}

#[test]
fn too_few_nodes_wait_for_the_join_timeout_and_report_which_have_joined() {
    let mut job = Job::of(2, settings(3, 3));
    job.now += Duration::from_secs(599);
    job.turn();
    assert!(job.told(0).is_empty());
    job.now += Duration::from_secs(1);
    job.turn();
    let hint = "hint: check that the other nodes were started with the same run id and endpoint, or raise the join timeout";
    assert_eq!(job.told(0), [format!("closed: 2 of 3 nodes joined within 600 s: a, b\n  {hint}")]);
    assert_eq!(job.told(1), [format!("closed: 1 of 3 nodes joined within 600 s: b\n  {hint}")]);
}

#[test]
fn a_node_that_times_out_while_the_missing_node_joins_continues() {
    let (mut folder, mut member) =
        (Member::new(settings(3, 3), node("a")), Member::new(settings(3, 3), node("b")));
    let mut state = state_of(&settings(3, 3), &["a", "b"]);
    member.decide(Some(&state.view("b")), Duration::ZERO);
    let late = Duration::from_secs(600);
    let proposal = member.decide(Some(&state.view("b")), late);
    let wish = proposal.wish.unwrap();
    assert_eq!((proposal.events, &wish.what), (Vec::new(), &What::GiveUp));
    // The other node was quicker.
    change(&mut state, |state| state.join(&node("c")));
    let (next, _) = folder.fold(&state, &[wish], 1, late).next.unwrap();
    assert_eq!((next.phase, next.members.len()), (Phase::Running, 3));
    assert!(matches!(member.decide(Some(&next.view("b")), late).events[..], [Event::Start(_)]));
}

#[test]
fn ranks_that_never_end_on_a_node_are_named_after_the_join_timeout() {
    let mut job = Job::of(2, settings(1, 2));
    job.fails(1, 0);
    job.stopped(1, 0);
    job.now += Duration::from_secs(600);
    job.turn();
    let text = "closed: the ranks of the previous round did not exit within 600 s on a";
    assert_eq!(job.told(0).last().unwrap(), text);
    assert_eq!(job.told(1).last().unwrap(), "start 1 as 0 of b, restart 1");
}

#[test]
fn different_settings_are_an_error_for_the_later_node_as_soon_as_another_is_known_to_live() {
    let mut job = Job::of(1, settings(2, 2));
    let folder = job.members[0].take();
    job.join_as(node("b"), settings(2, 3));
    job.turn();
    assert!(job.told(1).is_empty());
    job.members[0] = folder;
    job.turn();
    assert_eq!(
        job.told(1),
        [
            "closed: this node was started for 2 to 3 nodes and 3 restarts, but the running job `job` has 2 to 2 nodes and 3 restarts\n  \
          hint: give all nodes the same settings, or this node another run id"
        ]
    );
}

#[test]
fn settings_of_dead_nodes_are_not_an_error() {
    let mut job = Job::of(1, settings(2, 2));
    job.dies(0);
    job.join_as(node("b"), settings(1, 1));
    job.intervals(7);
    assert_eq!(job.told(1), ["start 0 as 0 of b"]);
}

#[test]
fn fixed_ranks_are_as_they_were_given() {
    let mut job = Job::new(settings(3, 3));
    [2, 0, 1].into_iter().for_each(|rank| job.join_fixed(rank));
    job.turn();
    assert_eq!(job.told(0), ["start 0 as 2 of b c a"]);
}

#[test]
fn the_second_node_with_a_fixed_rank_learns_which_node_has_it() {
    let mut job = Job::new(settings(2, 2));
    job.join_fixed(0);
    job.join_fixed(0);
    job.turn();
    job.intervals(2);
    assert_eq!(
        job.told(1),
        [
            "closed: node rank 0 is taken: the launcher on a has it\n  hint: give every node a different node rank"
        ]
    );
}

#[test]
fn a_node_that_was_launched_again_takes_its_fixed_rank_when_the_dead_one_is_noticed() {
    let mut job = Job::new(settings(2, 2));
    job.join_fixed(0);
    job.join_fixed(1);
    job.turn();
    job.dies(1);
    job.join_fixed(1);
    job.intervals(4);
    job.stopped(0, 0);
    assert_eq!(job.told(2), ["start 1 as 1 of a c, restart 1"]);
}

#[test]
fn invalid_fixed_ranks_are_errors() {
    let mut job = Job::new(settings(2, 2));
    job.join_fixed(2);
    job.turn();
    assert_eq!(job.told(0), ["closed: node rank 2 is too high: of 2 nodes the last one has rank 1"]);
    let mut job = Job::new(settings(1, 2));
    job.join_fixed(0);
    job.turn();
    assert_eq!(
        job.told(0),
        [
            "closed: 1 to 2 nodes cannot have fixed node ranks\n  hint: omit the node rank, or give a single number of nodes"
        ]
    );
    let mut job = Job::of(1, settings(2, 2));
    job.join_fixed(1);
    job.intervals(2);
    assert_eq!(
        job.told(1),
        ["closed: this node has a fixed node rank, but the one on a has no node rank\n  \
          hint: give all nodes a node rank, or none"]
    );
}

#[test]
fn a_newcomer_waits_until_all_know_that_the_job_before_is_over() {
    let mut job = Job::of(2, settings(2, 2));
    let unaware = job.members[1].take();
    job.done(0, 0);
    // The other node has acknowledged, then it is slow to read.
    job.change(|state| state.done("b", 0));
    job.join_as(node("c"), settings(2, 2));
    job.turn();
    assert_eq!(
        job.notes(2),
        ["the previous job with this run id has not ended on all its nodes; waiting for them"]
    );
    assert_eq!(job.state().job, 0);
    job.members[1] = unaware;
    job.members[1].as_mut().unwrap().obey(Order::Done { round: 0 });
    job.turn();
    assert_eq!(job.told(1), ["start 0 as 1 of a b", "success"]);
    assert_eq!((job.state().job, job.state().round, job.state().members.len()), (1, 0, 1));
}

#[test]
fn a_newcomer_does_not_wait_for_the_dead_of_the_job_before() {
    let mut job = Job::of(2, settings(1, 2));
    job.dies(1);
    job.change(|state| {
        state.done("a", 0);
        state.done("b", 0);
    });
    job.dies(0);
    job.join_as(node("c"), Settings { last_call: Duration::ZERO, ..settings(1, 2) });
    job.intervals(8);
    assert_eq!(job.told(2), ["start 0 as 0 of c"]);
    assert_eq!(job.state().job, 1);
}

#[test]
fn a_node_that_slept_into_the_next_job_learns_that() {
    let mut job = Job::of(2, settings(1, 2));
    let frozen = job.members[1].take();
    job.intervals(5);
    job.stopped(0, 0);
    job.done(0, 1);
    job.join();
    job.turn();
    job.members[1] = frozen;
    job.turn();
    let text = "the job `job` ended while this node was unresponsive";
    assert_eq!(job.told(1)[1..], [format!("stop 0: {text}"), format!("closed: {text}")]);
}

#[test]
fn a_store_that_has_lost_the_state_ends_the_job() {
    let mut job = Job::of(1, settings(1, 1));
    job.state = None;
    job.turn();
    let text = "the store has forgotten the job `job`";
    let hint = "hint: if its server was restarted, start all nodes again";
    assert_eq!(job.told(0)[1..], [format!("stop 0: {text}"), format!("closed: {text}\n  {hint}")]);
}

#[test]
fn a_proposal_whose_answer_was_lost_is_not_made_twice() {
    let mut member = Member::new(settings(1, 1), node("a"));
    let now = Duration::ZERO;
    let claim = member.decide(None, now).claim.unwrap();
    let state = State::of_head(claim);
    let wish = member.decide(Some(&state.view("a")), now).wish.unwrap();
    let (state, _) = member.fold(&state, &[wish], 0, now).next.unwrap();
    assert!(matches!(member.decide(Some(&state.view("a")), now).events[..], [Event::Start(_)]));
    member.obey(Order::Failed { round: 0, failure: failure(0, "a", 0) });
    // Proposed, not known to be written, and found to be.
    let wish = member.decide(Some(&state.view("a")), now).wish.unwrap();
    let (written, _) = member.fold(&state, std::slice::from_ref(&wish), 0, now).next.unwrap();
    let next = member.decide(Some(&written.view("a")), now);
    assert!(matches!(next.events[..], [Event::Stop { .. }]));
    assert_eq!((next.wish, written.restarts_used), (None, 1));
    assert_eq!(member.fold(&written, &[wish], 0, now).next, None, "it counts once");
}

#[test]
fn a_node_listens_to_a_bounded_number_of_others_and_the_folder_to_each() {
    let ids: Vec<String> = (0..100).map(|number| number.to_string()).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let state = state_of(&settings(1, 100), &ids);
    for id in &ids {
        let mut member = Member::new(settings(1, 100), node(id));
        let folded = Some(&state).filter(|state| state.folder == *id);
        let heard = member.listens_to(&state.view(id), folded);
        assert!(!heard.contains(&String::from(*id)));
        match folded {
            Some(_) => assert_eq!(heard.len(), 99),
            None => assert!(heard.len() == 9 && heard.contains(&state.folder), "{heard:?}"),
        }
    }
}

#[test]
fn as_many_nodes_as_there_may_be_fit_into_a_state() {
    let settings = settings(1, NODES_MAX);
    let info = |number: usize| {
        let name = format!("a-host-with-a-rather-long-name-{number:05}.cluster.example.org");
        NodeInfo {
            host: name.clone(),
            worker_store: Some(format!("{name}:29500")),
            ..node(&format!("{name}-12345-0123456789abcdef"))
        }
    };
    let empty = State::of_head(first_head(&settings, "a"));
    let mut state = empty.clone();
    for number in 0..NODES_MAX {
        state.spares.push(Seat { node: info(number), joined: number as u64, spare: true, ..Seat::default() });
    }
    state.joined = NODES_MAX as u64;
    state.join(&info(NODES_MAX)); // one too many, and the whole state is refused
    state.seal(&empty, Stamp(u64::from(u32::MAX), u64::from(u32::MAX)));
    let error = parse_head(&head_text(&state.head).unwrap()).unwrap_err();
    assert_eq!(error, "it is inconsistent: too many nodes");
    state.remove(&info(NODES_MAX).id, "");
    assert!(state.can_begin());
    state.begin();
    let change = state.seal(&empty, Stamp(u64::from(u32::MAX), u64::from(u32::MAX)));
    let head = parse_head(&head_text(&state.head).unwrap()).unwrap();
    assert_eq!(change.pages.len(), pages_for(NODES_MAX));
    let mut seats = Vec::new();
    for (_, page) in &change.pages {
        let text = serde_json::to_vec(page).unwrap();
        assert!(text.len() < PAGE_TEXT_MAX / 16, "{} bytes", text.len());
        seats.extend(parse_page(&text).unwrap());
    }
    assert_eq!(State::assemble(head, seats, None), Ok(state));
}

#[test]
fn a_state_reads_as_documented_and_fields_of_later_versions_are_ignored() {
    let mut state = state_of(&settings(1, 1), &["a"]);
    change(&mut state, State::begin);
    let text = concat!(
        r#"{"version":3,"turn":3,"term":1,"folder":"a","job":0,"round":0,"phase":"running","nodes_min":1,"#,
        r#""nodes_max":1,"max_restarts":3,"restarts_used":0,"replaced":0,"outcome":null,"reason":"","#,
        r#""settled":false,"members_count":1,"ready_count":1,"done_count":0,"spares_count":0,"hosts":[],"ranks":1,"#,
        r#""store":null,"folded":0,"joined":1,"pages":[[1,2]],"failure":null}"#
    );
    assert_eq!(String::from_utf8(head_text(&state.head).unwrap()).unwrap(), text);
    let later = text.replace(r#""version":3"#, r#""version":3,"color":"blue""#);
    assert_eq!(parse_head(later.as_bytes()), Ok(state.head.clone()));
    let page = concat!(
        r#"[{"node":{"id":"a","host":"a","ranks":1,"role":"default","fixed_rank":null,"worker_store":null},"#,
        r#""joined":1,"spare":false,"rank":0,"ready":true,"done":false,"first_rank":0,"first_role_rank":0,"#,
        r#""role_ranks":1}]"#
    );
    assert_eq!(serde_json::to_string(&state.members).unwrap(), page);
    assert_eq!(parse_page(page.as_bytes()).unwrap(), state.members);
}

#[test]
fn an_invalid_state_is_refused_with_the_reason() {
    let mut good = state_of(&settings(1, 2), &["a", "b"]);
    change(&mut good, State::begin);
    let error = |change: fn(&mut State)| {
        let mut state = good.clone();
        change(&mut state);
        let head = parse_head(&head_text(&state.head).unwrap())?;
        let seats = state.seats().cloned().collect();
        State::assemble(head, seats, state.failure.clone()).map(drop)
    };
    assert_eq!(error(|_| ()), Ok(()));
    let error = |change| error(change).unwrap_err();
    assert_eq!(
        error(|state| state.members[1].node.id = "a".into()),
        "it is inconsistent: a node is listed twice"
    );
    assert_eq!(
        error(|state| state.members[1].rank = Some(0)),
        "it is inconsistent: two nodes have the same rank"
    );
    assert_eq!(
        error(|state| state.members[1].rank = None),
        "it is inconsistent: a round runs without all its ranks"
    );
    assert_eq!(
        error(|state| state.members[1].node.ranks = usize::MAX),
        "it is inconsistent: a node has too many ranks"
    );
    assert_eq!(
        error(|state| state.members.iter_mut().for_each(|seat| seat.node.fixed_rank = Some(0))),
        "it is inconsistent: two nodes were given the same rank"
    );
    assert_eq!(error(|state| state.nodes_max = 1), "it is inconsistent: more members than allowed");
    assert_eq!(
        error(|state| state.nodes_min = 0),
        "it is inconsistent: the limits of the number of nodes are wrong"
    );
    assert_eq!(
        error(|state| state.phase = Phase::Over),
        "it is inconsistent: phase and outcome contradict each other"
    );
    assert_eq!(
        error(|state| (state.phase, state.outcome) = (Phase::Over, Some(Ending::Failed))),
        "it is inconsistent: phase and outcome contradict each other"
    );
    assert_eq!(
        error(|state| state.version = u64::MAX),
        "it is inconsistent: a counter has reached its limit"
    );
    assert_eq!(error(|state| state.phase = Phase::Unknown), "it is inconsistent: its phase is unknown");
    assert_eq!(
        error(|state| state.term = 0),
        "it is inconsistent: no node has the task of changing it",
        "an older version of tenfold wrote it"
    );
    assert_eq!(error(|state| state.pages.clear()), "it is inconsistent: the number of pages is wrong");
    assert_eq!(
        error(|state| drop(state.members.pop())),
        "it is inconsistent: nodes are missing in its pages"
    );
    assert_eq!(
        error(|state| state.head.failure = Some(Stamp(1, 1))),
        "it is inconsistent: the report of the failure is missing"
    );
    good.reason = "x".repeat(1 << 16);
    let text = serde_json::to_vec(&good.head).unwrap();
    assert_eq!(
        parse_head(&text).unwrap_err(),
        format!("it is {} bytes long, the limit is 65536", text.len())
    );
    assert_eq!(
        head_text(&good.head).unwrap_err(),
        format!("it would be {} bytes long, the limit is 65536", text.len())
    );
}

// ── the folder ─────────────────────────────────────────────────────────────────────────────────────────────

#[test]
fn when_the_folder_dies_another_node_takes_over_and_removes_it() {
    let mut job = Job::of(3, settings(2, 3));
    job.interval();
    assert_eq!((job.state().folder.as_str(), job.state().term), ("a", 1));
    job.dies(0);
    job.intervals(3);
    assert_eq!(job.state().term, 1, "not yet");
    job.intervals(2);
    assert_eq!(job.told(1)[1..], ["stop 0: node a sent no heartbeat for 15 s"]);
    assert_eq!((job.state().folder.as_str(), job.state().term), ("b", 2));
    job.stopped(1, 0);
    job.stopped(2, 0);
    assert_eq!(job.told(2).last().unwrap(), "start 1 as 0 of c b");
}

#[test]
fn a_folder_that_leaves_appoints_another_node() {
    let mut job = Job::of(3, settings(2, 3));
    job.leaves(0);
    assert_eq!((job.state().folder.as_str(), job.state().term), ("b", 2));
    job.stopped(1, 0);
    job.stopped(2, 0);
    job.done(1, 1);
    job.leaves(1);
    assert_eq!((job.state().folder.as_str(), job.state().phase), ("c", Phase::Running), "also if it is done");
    job.done(2, 1);
    assert_eq!(job.told(2).last().unwrap(), "success");
}

#[test]
fn a_former_folder_changes_nothing() {
    let mut state = state_of(&settings(2, 2), &["a", "b"]);
    let mut former = Member::new(settings(2, 2), node("a"));
    let now = Duration::ZERO;
    let wish = Wish { node: "b".into(), job: 0, round: 0, what: What::Leave { why: "b left".into() } };
    let (late, change_late) = former.fold(&state, &[wish], 1, now).next.unwrap();
    state.head = taken_over(&state.head, "b");
    let mut folder = Member::new(settings(2, 2), node("b"));
    let (next, change) = folder.fold(&state, &[], 1, now).next.unwrap();
    assert_eq!(next.phase, Phase::Running);
    assert_ne!(change.stamp, change_late.stamp, "they write different keys");
    assert_eq!((late.version, next.version), (3, 4), "and expect different heads");
}

#[test]
fn wishes_about_what_has_passed_are_void() {
    let settings = Settings { last_call: Duration::ZERO, ..settings(1, 3) };
    let mut state = state_of(&settings, &["a", "b"]);
    let mut folder = Member::new(settings.clone(), node("a"));
    let wish = |id: &str, job: u64, round: u64, what: What| Wish { node: id.into(), job, round, what };
    let join = || What::Join { node: node("c"), limits: settings.limits() };
    change(&mut state, State::begin);
    change(&mut state, |state| state.fail("b", failure(0, "b", 1)));
    assert_eq!((state.round, state.phase), (1, Phase::Joining));
    let past = [
        wish("a", 0, 0, What::Ready),
        wish("a", 1, 1, What::Ready),
        wish("b", 0, 0, What::Done),
        wish("b", 0, 0, What::Failed { failure: failure(0, "b", 1) }),
        wish("b", 0, 0, What::GiveUp),
        wish("b", 0, 1, What::Acknowledge),
        wish("c", 0, 0, join()),
        wish("b", 0, 1, join()),
    ];
    assert_eq!(folder.fold(&state, &past, 8, Duration::ZERO).next, None);
    let (next, _) = folder.fold(&state, &[wish("c", 0, 1, join())], 9, Duration::ZERO).next.unwrap();
    assert_eq!((next.members.len(), next.folded), (3, 9));
}

#[test]
fn a_state_changes_only_the_pages_of_nodes_that_change() {
    let ids: Vec<String> = (0..1000).map(|number| format!("node-{number}")).collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let mut state = state_of(&settings(1, 1000), &ids);
    change(&mut state, State::begin);
    assert_eq!(state.head.pages.len(), 32);
    let (before, turn) = (state.clone(), state.turn);
    state.done("node-7", 0);
    let change = state.seal(&before, Stamp(1, 9));
    assert_eq!((change.pages.len(), change.pages_old.len(), change.turn, state.turn), (1, 1, None, turn));
    let page = change.pages[0].0;
    assert_eq!(state.head.pages.iter().filter(|&&stamp| stamp == Stamp(1, 9)).count(), 1);
    assert_eq!(state.head.pages[page], Stamp(1, 9));
    let longest = head_text(&Head { reason: "x".repeat(100), ..state.head.clone() }).unwrap().len();
    assert!(longest < 2048, "all nodes read a head of {longest} bytes");
}
