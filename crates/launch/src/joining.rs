//! Joins a job: finds the store, joins the rendezvous, shows the dashboard.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use super::args::Meeting;
use super::endpoint::{self, Home};
use super::ranks_store::RanksStore;
use super::relaying::{self, Relaying};
use super::rendezvous::{self, Event, NodeInfo, Rendezvous};
use super::{Launch, News, host_name};
use tenfold_dashboard as dashboard;

impl Launch {
    /// On a separate thread: another node may host the store, and start late.
    pub(super) fn find_store(&self) -> io::Result<()> {
        let (plan, herald) = (self.plan.clone(), self.herald.clone());
        let find = move || {
            let note = |line| herald.tell(News::Note(line));
            match endpoint::open(&plan, &note) {
                Ok(home) => herald.tell(News::Arrived(home)),
                Err(text) => herald.tell(News::Lost(text)),
            }
        };
        std::thread::Builder::new().name("run-endpoint".into()).spawn(find).map(drop)
    }

    pub(super) fn join(&mut self, home: Home) -> Result<(), Box<dyn std::error::Error>> {
        let plan = &self.plan;
        let settings = rendezvous::Settings {
            run_id: self.job.run_id.clone(),
            nodes_min: plan.nodes.min,
            nodes_max: plan.nodes.max,
            max_restarts: plan.max_restarts,
            join_timeout: plan.settings.join_timeout,
            last_call: plan.settings.last_call,
            beat_interval: plan.settings.beat_interval,
            beats_missed_max: plan.settings.beats_missed_max,
        };
        let fixed_rank = match plan.meeting {
            Meeting::Static { node_rank, .. } => Some(node_rank),
            Meeting::Alone | Meeting::Elastic { .. } => None,
        };
        let node = NodeInfo {
            id: self.node_id.clone(),
            host: plan.local_address.clone().unwrap_or_else(host_name),
            ranks: plan.ranks,
            role: plan.role.clone(),
            fixed_rank,
            worker_store: home.server.as_ref().map(|_| home.endpoint.to_string()),
        };
        let relaying = Relaying {
            is_wanted: plan.wants_relay,
            ranks: plan.ranks,
            other_users: plan.other_users,
            connect_max: relaying::CONNECT_MAX,
            is_told: AtomicBool::new(false),
        };
        let (store, herald, notes) = (home.store.clone(), self.herald.clone(), self.herald.clone());
        let ranks_store = RanksStore {
            store: store.clone(),
            met_at: home.endpoint.clone(),
            local_address: plan.local_address.clone(),
            other_users: plan.other_users,
            hosted: home.server.clone(),
            node_id: self.node_id.clone(),
            prefix: format!("tenfold/run/{}/store", self.job.run_id),
            own: Mutex::new(None),
            announced: Mutex::new(None),
            note: Box::new(move |line| notes.tell(News::Note(line))),
        };
        let has_others = plan.nodes.max > 1;
        let tell = move |event| {
            herald.tell(match event {
                Event::Held(_) if !has_others => return,
                Event::Held(until) => News::Held(until),
                Event::Start(assignment) => match ranks_store.of(&assignment) {
                    Ok(endpoint) => {
                        let note = |line| herald.tell(News::Note(line));
                        let door = relaying.open(endpoint, ranks_store.is_here(&assignment), &note);
                        News::Start(Box::new(assignment), door)
                    }
                    Err(text) => News::Lost(text),
                },
                Event::Stop { round, reason } => News::Stop { round, reason },
                Event::Over(outcome) => {
                    ranks_store.forget();
                    News::Over(outcome)
                }
                Event::Note(line) => News::Awaited(line),
            });
        };
        self.show_dashboard(&home)?;
        self.rendezvous = Some(Rendezvous::join(store, settings, node, tell)?);
        self.home = Some(home);
        Ok(())
    }

    /// The page shows what is in the store, so the node that hosts the store serves it.
    fn show_dashboard(&mut self, home: &Home) -> io::Result<()> {
        let Some(options) = self.plan.dashboard.clone() else { return Ok(()) };
        let Some(server) = &home.server else {
            let note = "no dashboard on this node: use --dashboard on the node that hosts the store";
            self.outlet.note(note);
            return Ok(());
        };
        let dashboard = dashboard::start(options, server.clone())?;
        self.outlet.note(&dashboard.to_string());
        if let Some(warning) = dashboard.warning() {
            self.outlet.note(&format!("warning: {warning}"));
        }
        self.dashboard = Some(dashboard);
        Ok(())
    }
}
