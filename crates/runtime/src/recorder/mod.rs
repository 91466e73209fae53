//! The flight recorder: what this process called last, and how far it got.
//!
//! Always on. Every operation of every group is written into one ring of fixed records (`ring.rs`) when it is called, begun and
//! ended; writers take no lock and allocate nothing. What is in the ring can be read at any time ([`entries`]), and goes into
//! a file in c10d's format (`dump.rs`) when a group fails, on a signal if asked for, or on request: PyTorch's own analyser and
//! `tenfold trace` read those.
//!
//! ```
//! use tenfold::{Group, ReduceOp, Buffer, recorder};
//!
//! Group::threads(2, |group| {
//!     let mut tensor = Buffer::from_slice(&[1.0_f32, 2.0]);
//!     group.start_all_reduce(tensor.lend(), ReduceOp::Sum)?.wait()?;
//!     Ok(())
//! })?;
//! let entries = recorder::entries();
//! let last = entries.last().expect("there was a call");
//! assert_eq!((last.profiling_name.as_str(), last.state.name()), ("tenfold:all_reduce", "completed"));
//! assert!(recorder::dump_json(&recorder::DumpOptions::default()).contains("\"version\":\"2.10\""));
//! recorder::reset();
//! assert!(recorder::entries().is_empty());
//! # Ok::<(), tenfold::Error>(())
//! ```
//!
//! Settings are c10d's variables (`settings.rs`): `TORCH_FR_BUFFER_SIZE` (operations remembered, 2000; 0 turns it off),
//! `TORCH_FR_DUMP_TEMP_FILE` (how file names begin; the rank follows), `TORCH_FR_DUMP_DYNAMIC_FILE_NAME`,
//! `TORCH_FR_DUMP_ON_TIMEOUT`, `TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC`, `TORCH_FR_CPP_STACK`, `TORCH_INCLUDE_STACK_TRACE`,
//! `TORCH_INCLUDE_ONLY_ACTIVE`; and of our own `TENFOLD_FR_SIGNAL`.
//!
//! Not here: counts and durations (see `metrics`), what a dump means (see `tenfold trace`).

mod clock;
mod dump;
mod entry;
mod file;
mod groups;
mod pickle;
mod ring;
mod settings;
mod site;

use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock, OnceLock};

use tenfold_plan::Rank;

use crate::debug;

pub use dump::{DumpOptions, Entry};
pub use entry::State;
#[doc(hidden)]
pub use file::DUMPING;
pub use site::{CallSite, Frame, with_call_site};

pub(crate) use clock::host_now;
#[cfg(feature = "control")]
pub(crate) use dump::dump_of_nothing;
pub(crate) use entry::{Called, Sizes};
#[cfg(feature = "control")]
pub(crate) use file::write_all;
pub(crate) use file::{dump_for, dump_if_signalled, expect_dump, wait_until_dumped};
pub(crate) use groups::{GroupRecord, Newcomer, Stalls, Ticket, Waited};
pub(crate) use settings::Settings;
pub(crate) use site::{Site, caller, with_site};

use groups::{Groups, Threads};
use ring::Ring;
use site::Sites;

/// What the process records.
#[derive(Debug)]
pub(crate) struct Recorder {
    settings: Settings,
    ring: Option<Ring>,
    sites: Sites,
    groups: Groups,
    /// The rank of this process in its job: that in the first group it joined.
    process_rank: OnceLock<Rank>,
    /// Set by a signal handler.
    signalled: Arc<AtomicBool>,
}

static RECORDER: LazyLock<Recorder> = LazyLock::new(|| {
    // An invalid value was refused when the first group was made.
    let recorder = Recorder::new(crate::environment::recorder_settings().unwrap_or_default());
    file::listen_for_signal(&recorder);
    recorder
});

/// The same for log lines, which may be written while the recorder is being made.
static PROCESS_RANK: OnceLock<Rank> = OnceLock::new();

static THREADS: LazyLock<Threads> = LazyLock::new(Threads::default);

thread_local! {
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

impl Recorder {
    fn new(settings: Settings) -> Self {
        Recorder {
            ring: (settings.capacity > 0).then(|| Ring::new(settings.capacity)),
            settings,
            sites: Sites::default(),
            groups: Groups::default(),
            process_rank: OnceLock::new(),
            signalled: Arc::default(),
        }
    }

    #[inline]
    fn this_thread(&self) -> u32 {
        THREAD.with(|number| {
            if number.get() == 0 {
                number.set(THREADS.add());
            }
            number.get()
        })
    }
}

/// A group was made.
pub(crate) fn join(new: Newcomer<'_>) -> Arc<GroupRecord> {
    let recorder = &*RECORDER;
    let among_threads = new.among_threads;
    let group = recorder.groups.add(recorder, new);
    if !among_threads {
        let rank = *recorder.process_rank.get_or_init(|| group.global_rank());
        PROCESS_RANK.get_or_init(|| rank);
    }
    group
}

/// The rank of this process in its job: that in the first group it joined. Nothing before, and where ranks are threads.
pub fn process_rank() -> Option<Rank> {
    PROCESS_RANK.get().copied()
}

/// Every group that has records, with its counts.
pub(crate) fn groups() -> Vec<Arc<GroupRecord>> {
    RECORDER.groups.all()
}

/// The operations that are remembered, in the order in which they were called.
pub fn entries() -> Vec<Entry> {
    let mut everything = DumpOptions::default();
    everything.only_active = false;
    dump::entries(&RECORDER, &everything)
}

/// How many operations were not recorded because another thread was writing in their place. Needs a thread that is held up
/// for as long as others take to call as many operations as the ring holds.
pub fn lost() -> u64 {
    RECORDER.ring.as_ref().map_or(0, Ring::lost)
}

/// Is anything recorded? Not with `TORCH_FR_BUFFER_SIZE=0`.
pub fn is_on() -> bool {
    RECORDER.ring.is_some()
}

/// Are call sites wanted? Then a caller that knows one hands it in by [`with_call_site`].
pub fn wants_call_sites() -> bool {
    debug::level() == debug::Level::Detail || RECORDER.settings.stacks && is_on()
}

/// What is remembered, as c10d's JSON.
pub fn dump_json(options: &DumpOptions) -> String {
    dump::json(&dump::snapshot(&RECORDER, None, options), options)
}

/// What is remembered, as c10d's pickle: what its files hold and its analyser reads.
pub fn dump_pickle(options: &DumpOptions) -> Vec<u8> {
    dump::pickle(&dump::snapshot(&RECORDER, None, options), options)
}

/// Writes the pickle to `TORCH_FR_DUMP_TEMP_FILE` with `rank` behind it; where that is.
///
/// # Errors
/// If the file cannot be written; the error names it.
pub fn dump_file(rank: Rank, options: &DumpOptions) -> io::Result<PathBuf> {
    file::write(&RECORDER, rank, options)
}

/// Records made-up operations in a ring of its own, to measure what recording costs. For `examples/recorder.rs`.
#[doc(hidden)]
pub fn record_for_nothing() -> impl FnMut(u32) {
    let recorder: &'static Recorder = Box::leak(Box::new(Recorder::new(Settings::default())));
    let fabric = crate::wire::FabricId(0);
    let new = Newcomer { name: "none", rank: 0, size: 2, global_ranks: None, fabric, among_threads: false };
    let group = recorder.groups.add(recorder, new);
    let sizes = Sizes::one(2);
    let mut call = Called {
        kind: crate::OpKind::AllReduce,
        dtype: Some(crate::DType::F32),
        reduction: 0,
        collectives: 0,
        messages: 0,
        input: sizes,
        output: sizes,
        peer: None,
        timeout_ms: 1000,
        starts: false,
    };
    move |times| {
        for _ in 0..times {
            call.collectives += 1;
            let mut ticket = group.called(&call);
            group.started_next(&mut ticket);
            group.completed(&ticket, Waited::All);
        }
    }
}

/// Returns when no dump of a failed group is being written any more, or after `TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC`. Dropping a group
/// and [`Group::abort`](crate::Group::abort) call this. A program that exits in another way may call it, too.
pub fn wait_until_written() {
    wait_until_dumped();
}

/// Forgets what was recorded so far: later dumps begin with the next operation.
pub fn reset() {
    if let Some(ring) = &RECORDER.ring {
        ring.reset();
    }
}
