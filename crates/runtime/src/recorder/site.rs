//! Where a call comes from, and the shapes it was made with: what only the caller knows.
//!
//! A language binding hands it in around a call. It is kept beside the ring, for as long as the record is. A program that hands
//! in none pays for reading one flag.
//!
//! If no call site was handed in, it is taken from the stack. A program calls from few places, so each place is kept by the
//! addresses on the stack: its names are looked up once, which takes a hundred microseconds, and not with every call.

use std::backtrace::Backtrace;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use tenfold_memory::return_addresses;

/// Frames that are kept of a stack.
const FRAMES_MAX: usize = 64;

/// Addresses of a stack that tell it from others: more than is shown of it, with what is left out as our own.
const ADDRESSES_MAX: usize = 128;

/// Places that are kept. When a program calls from more places, all are forgotten.
const PLACES_MAX: usize = 1024;

/// A function on the stack of a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The name of the function.
    pub name: String,
    /// The file that it is in.
    pub file: String,
    /// The line in that file.
    pub line: u32,
}

/// Where a call comes from.
#[derive(Clone, Debug, Default)]
pub struct CallSite {
    /// The innermost first.
    pub frames: Vec<Frame>,
    /// Shapes of the tensors that go in and come out; nothing leaves them flat.
    pub input_shapes: Option<Vec<Vec<u64>>>,
    /// Shapes of the tensors that come out.
    pub output_shapes: Option<Vec<Vec<u64>>>,
}

/// A site as it is kept. Names are looked up when they are read.
#[derive(Debug)]
pub(crate) enum Site {
    Given(CallSite),
    Rust { stack: Backtrace, known: OnceLock<CallSite> },
}

impl Site {
    pub(crate) fn get(&self) -> &CallSite {
        match self {
            Site::Given(site) => site,
            Site::Rust { stack, known } => {
                known.get_or_init(|| CallSite { frames: parse(&stack.to_string()), ..CallSite::default() })
            }
        }
    }
}

thread_local! {
    static GIVEN: RefCell<Option<Arc<Site>>> = const { RefCell::new(None) };
}

/// Has any call site ever been given?
static IN_USE: AtomicBool = AtomicBool::new(false);

/// Runs `call` with `site` noted for every operation it calls on this thread.
pub fn with_call_site<R>(site: CallSite, call: impl FnOnce() -> R) -> R {
    with_site(Arc::new(Site::Given(site)), call)
}

/// As [`with_call_site`].
pub(crate) fn with_site<R>(site: Arc<Site>, call: impl FnOnce() -> R) -> R {
    struct Restore(Option<Arc<Site>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            GIVEN.set(self.0.take());
        }
    }
    IN_USE.store(true, Ordering::Relaxed);
    let _restore = Restore(GIVEN.replace(Some(site)));
    call()
}

/// Where the call that is being made on this thread comes from, as it was given or by the stack.
pub(crate) fn caller() -> Arc<Site> {
    GIVEN.with_borrow(Option::clone).unwrap_or_else(by_stack)
}

fn by_stack() -> Arc<Site> {
    type Known = HashMap<Box<[usize]>, Arc<Site>>;
    static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
    let mut addresses = [0; ADDRESSES_MAX];
    let count = return_addresses(&mut addresses);
    let addresses = &addresses[..count];
    let lock = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(site) = lock().get(addresses) {
        return Arc::clone(site);
    }
    // Without the lock: unwinding takes the loader's.
    let site = Arc::new(Site::Rust { stack: Backtrace::force_capture(), known: OnceLock::new() });
    let mut known = lock();
    if known.len() >= PLACES_MAX {
        known.clear();
    }
    known.insert(addresses.into(), Arc::clone(&site));
    site
}

/// The site of a call that is being made on this thread.
#[inline]
pub(super) fn current(stacks: bool) -> Option<Arc<Site>> {
    if !stacks && !IN_USE.load(Ordering::Relaxed) { None } else { find(stacks) }
}

#[cold]
fn find(stacks: bool) -> Option<Arc<Site>> {
    if stacks { Some(caller()) } else { GIVEN.with_borrow(Option::clone) }
}

/// Sites beside the slots of a ring.
#[derive(Debug, Default)]
pub(super) struct Sites {
    places: OnceLock<Box<[Place]>>,
}

type Place = Mutex<Option<(u64, Arc<Site>)>>;

impl Sites {
    pub(super) fn put(&self, id: u64, site: Arc<Site>, capacity: usize) {
        let places = self.places.get_or_init(|| (0..capacity.max(1)).map(|_| Mutex::default()).collect());
        *places[id as usize % places.len()].lock().unwrap_or_else(PoisonError::into_inner) = Some((id, site));
    }

    pub(super) fn get(&self, id: u64) -> Option<Arc<Site>> {
        let places = self.places.get()?;
        let place = places[id as usize % places.len()].lock().unwrap_or_else(PoisonError::into_inner);
        place.as_ref().filter(|(of, _)| *of == id).map(|(_, site)| Arc::clone(site))
    }
}

/// Frames of a backtrace as std shows it, from the caller of this crate on.
fn parse(shown: &str) -> Vec<Frame> {
    let mut frames: Vec<Frame> = Vec::new();
    for line in shown.lines().map(str::trim) {
        if let Some(place) = line.strip_prefix("at ") {
            let mut parts = place.rsplitn(3, ':');
            let (_column, line, file) = (parts.next(), parts.next(), parts.next());
            if let (Some(frame), Some(file)) = (frames.last_mut(), file) {
                frame.file = file.to_string();
                frame.line = line.and_then(|line| line.parse().ok()).unwrap_or(0);
            }
        } else if let Some((number, name)) = line.split_once(": ")
            && number.bytes().all(|digit| digit.is_ascii_digit())
        {
            frames.push(Frame { name: name.to_string(), file: String::new(), line: 0 });
        }
    }
    // What was inlined has a short name, but a file. Paths below the current folder are shown relative to it.
    let current = std::env::current_dir().unwrap_or_default();
    let is_ours = |frame: &Frame| {
        let name = frame.name.trim_start_matches('<');
        let file = current.join(frame.file.trim_start_matches("./"));
        let own = ["tenfold::", "std::backtrace", "core::", "std::thread::local"];
        own.iter().any(|own| name.starts_with(own))
            || file.starts_with("/rustc/")
            || file.starts_with(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))
    };
    let first = frames.iter().position(|frame| !is_ours(frame)).unwrap_or(0);
    frames.drain(..first);
    frames.truncate(FRAMES_MAX);
    frames
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backtrace_is_read_from_the_first_frame_that_is_not_ours() {
        let shown = "   0: std::backtrace::Backtrace::force_capture\n             at /rustc/a/backtrace.rs:312:9\n   \
                     1: <tenfold::group::Group>::all_reduce\n             at ./src/call.rs:10:5\n   2: train::step\n   \
                     \x20         at /me/src/main.rs:42:13\n   3: main\n";
        let inlined =
            format!("   0: caller\n at {}/src/recorder/site.rs:79:1\n{shown}", env!("CARGO_MANIFEST_DIR"));
        assert_eq!(parse(&inlined), parse(shown));
        let expected = [
            Frame { name: "train::step".into(), file: "/me/src/main.rs".into(), line: 42 },
            Frame { name: "main".into(), file: String::new(), line: 0 },
        ];
        assert_eq!(parse(shown), expected);
        assert_eq!(parse("disabled backtrace"), []);
    }

    #[test]
    fn a_site_is_for_the_calls_within_and_for_no_others() {
        assert!(current(false).is_none());
        let frames = vec![Frame { name: "f".into(), file: "x.py".into(), line: 3 }];
        let site = CallSite { frames: frames.clone(), ..CallSite::default() };
        let seen = with_call_site(site, || current(false).map(|site| site.get().frames.clone()));
        assert_eq!(seen, Some(frames));
        assert!(current(false).is_none());
        assert!(current(true).is_some_and(|site| matches!(&*site, Site::Rust { .. })));
    }

    #[test]
    fn a_place_is_looked_up_once_and_another_is_another() {
        let mut twice = Vec::new();
        while twice.len() < std::hint::black_box(2) {
            twice.push(caller()); // from one place: `black_box` keeps the compiler from unrolling the loop
        }
        assert!(Arc::ptr_eq(&twice[0], &twice[1]));
        let other = caller();
        assert!(!Arc::ptr_eq(&twice[0], &other));
    }

    #[test]
    fn a_site_is_found_by_the_record_it_belongs_to_only() {
        let sites = Sites::default();
        let site = Arc::new(Site::Given(CallSite::default()));
        sites.put(1, Arc::clone(&site), 4);
        assert!(sites.get(1).is_some() && sites.get(5).is_none());
        sites.put(5, site, 4);
        assert!(sites.get(1).is_none() && sites.get(5).is_some());
    }
}
