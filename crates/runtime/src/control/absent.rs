//! For a build without the feature `control`: a call that starts a worker server returns an error that names the feature.

use tenfold_plan::Rank;

use crate::fault::Fault;

/// Nothing to hold.
#[derive(Clone, Debug)]
pub(crate) struct Lease;

pub(crate) fn start_if_asked(asked: Option<&str>, _rank: Rank) -> Result<Lease, Fault> {
    match asked {
        None => Ok(Lease),
        Some(place) => {
            Err(Fault::argument(format!("`TENFOLD_WORKER_SERVER={place}`, but this program cannot be asked"))
                .hint("build it with the feature `control` of the crate `tenfold`, or unset the variable"))
        }
    }
}
