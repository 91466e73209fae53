//! Memory of tenfold: dtypes, reductions, shared segments, and all of its unsafe code.

#![warn(missing_docs)]

mod buffer;
mod dtype;
mod float8;
mod fork;
mod lend;
mod mailbox;
mod reduce;
mod reduce_op;
mod region;
mod room;
mod segment;
pub mod socket;
mod span;
pub mod spawn;
mod stack;
mod sync;

pub use buffer::{Buffer, BufferView, Whole};
pub use dtype::{DType, Element, UnknownDType};
pub use float8::{F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ};
pub use fork::{ForkGuard, NotInherited};
pub use lend::{Lender, lend};
pub use mailbox::{CELLS, Head, INLINE, Inbox, Lane, Outbox, Payload, Wanted, before_looking};
pub use reduce::{Level, Reduction};
pub use reduce_op::{CustomFunction, CustomOp, ReduceOp, UnknownOp, Unsupported, supports};
pub use region::{FileIdentity, Lease, PeerRegion, REGION_BYTES_MAX, REGIONS_MAX, Region};
pub use room::{Doing, Link, PeerRoom, Room, SLOT, SLOTS_OWN, SLOTS_SHARED, slots};
pub use segment::{Block, PAGE, PeerSegment, Segment};
pub use span::{Bytes, Span, prefers_streaming};
pub use stack::return_addresses;
