//! What Python users see of the library's log: lines on standard error.
//!
//! Warnings are shown unless `TENFOLD_LOG` says otherwise, and with a debug level of INFO or more also what is worth knowing.
//! A line begins with `tenfold: rank 3: `. Most are written by threads of the engine, so nothing here touches Python: they do
//! not go through `logging`, and are there even while the interpreter ends.
//!
//! The log begins with the first store or group that Python makes.

use std::fmt;
use std::sync::OnceLock;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tenfold::debug;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Registry;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Changes the filter when the debug level changes; `None` if the program has its own subscriber.
static FILTER: OnceLock<Option<reload::Handle<Targets, Registry>>> = OnceLock::new();

/// Shows the log from now on, if it is not shown yet.
pub(crate) fn start() -> PyResult<()> {
    if FILTER.get().is_some() {
        return Ok(());
    }
    let (filter, handle) = reload::Layer::new(filter()?);
    FILTER.get_or_init(|| {
        let lines = tracing_subscriber::fmt::layer()
            .event_format(Line)
            .with_ansi(false)
            .with_writer(tenfold_console::LogWriter::new)
            .log_internal_errors(false); // it would panic where standard error is closed
        tracing_subscriber::registry().with(filter).with(lines).try_init().ok().map(|()| handle)
    });
    Ok(())
}

fn filter() -> PyResult<Targets> {
    let default = if debug::level() >= debug::Level::Info { "info" } else { "warn" };
    tenfold_console::log_filter(default).map_err(PyValueError::new_err)
}

fn set(level: debug::Level) -> PyResult<()> {
    debug::set_level(level);
    if let Some(Some(handle)) = FILTER.get() {
        let _is_shown_as_before = handle.reload(filter()?);
    }
    Ok(())
}

/// c10d's debug level, as its number.
#[pyfunction]
pub(crate) fn debug_level() -> u8 {
    debug::level() as u8
}

#[pyfunction]
pub(crate) fn set_debug_level(level: u8) -> PyResult<()> {
    match level {
        0 => set(debug::Level::Off),
        1 => set(debug::Level::Info),
        2 => set(debug::Level::Detail),
        other => Err(PyValueError::new_err(format!("there is no debug level {other}"))),
    }
}

#[pyfunction]
pub(crate) fn set_debug_level_from_env() -> PyResult<()> {
    debug::set_level_from_environment().map_err(|fault| PyValueError::new_err(fault.message))?;
    set(debug::level())
}

/// As in ``tenfold: rank 3: no sign of life for 5.0 s from …``.
struct Line;

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        writer.write_str("tenfold: ")?;
        if let Some(rank) = tenfold::recorder::process_rank() {
            write!(writer, "rank {rank}: ")?;
        }
        // Who asks for these wants to know where they come from.
        if *event.metadata().level() >= Level::DEBUG {
            write!(writer, "{}: ", event.metadata().target())?;
        }
        let mut line = String::new();
        context.format_fields(Writer::new(&mut line), event)?;
        // A text that came from elsewhere must not look like more than one line.
        writeln!(writer, "{}", line.replace(['\n', '\r'], " "))
    }
}
