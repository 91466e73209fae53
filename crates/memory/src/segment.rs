//! Shared memory of one process: it writes, its peers read.
//!
//! A [`Segment`] is an unnamed file in memory (memfd), mapped whole by its owner; a [`PeerSegment`] is the same file mapped
//! read-only by another process. The file has no name, so `kill -9` leaves nothing behind, and a container's small
//! `/dev/shm` does not matter. The file is as large as it may ever become: pages are allocated when they are first touched,
//! and a [`Block`] gives its pages back when it is dropped.
//!
//! That peers map it read-only protects against their mistakes, not against a hostile process of the same user, which can open
//! the file again for writing. `F_SEAL_FUTURE_WRITE` would prevent that, but the kernel then refuses to punch holes, too, and no
//! page could ever be given back.
//!
//! What a peer wrote is input: every offset that comes from one is checked against the mapping before it is used.
//!
//! Not here: what lies in a block (see `mailbox`), how a descriptor travels (see the runtime).

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

use crate::region::{Lease, PeerRegion, PeerRegions, Region, Regions};
use crate::{Bytes, ForkGuard, Span};

/// Blocks begin on pages, so that a block's memory can be given back and two blocks never share a cache line.
pub const PAGE: usize = 4096;

/// First words of a segment: what it is, in which layout. A peer of another version is refused, not misread.
const MAGIC: u64 = u64::from_le_bytes(*b"tenfold\x01");

/// The first page of a segment.
#[repr(C)]
struct Header {
    magic: AtomicU64,
    /// Counts up as long as its process runs, so that peers can tell a stopped process from one that computes.
    pulse: AtomicU64,
}

/// An address range of a memory file, unmapped on drop.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is an address range; who may touch which byte when is decided by the types built on it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(file: impl AsFd, len: usize, access: ProtFlags) -> io::Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice cannot touch memory of ours.
        let start = unsafe { rustix::mm::mmap(ptr::null_mut(), len, access, flags, file, 0) }?;
        // A dump of a rank that crashed would go through every page of its own segment and of its peers', which are mostly
        // holes; the rank would seem alive meanwhile. If the system refuses, only the dump is larger.
        // SAFETY: it changes what a dump contains, and nothing of the mapping, which was just made.
        let _ = unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxDontDump) };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, len })
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The bytes from `at`, if they lie within.
    #[inline]
    pub(crate) fn bytes(&self, at: usize, len: usize) -> Option<Bytes<'_>> {
        if at > self.len || len > self.len - at {
            return None;
        }
        // SAFETY: checked above to lie within the mapping, which lives as long as `self`.
        Some(unsafe { Bytes::from_raw(self.start.add(at), len) })
    }

    /// Of a segment, which is at least a page long.
    fn header(&self) -> &Header {
        assert!(self.len >= PAGE, "a segment has its header");
        // SAFETY: a mapping begins on a page, this one is at least a page long, and any bytes are a value of these atomics.
        unsafe { self.start.cast().as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; every span and record into it keeps the segment alive.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// This process's shared memory: the only one that it writes.
pub struct Segment {
    mapping: Mapping,
    file: OwnedFd,
    free: Mutex<BTreeMap<usize, usize>>,
    abandoned: AtomicBool,
    guard: ForkGuard,
    /// Memory elsewhere that is lent as if it lay here.
    regions: Regions,
}

impl Segment {
    /// A segment of at most `len` bytes, none of which exists until it is touched.
    pub fn new(len: usize) -> io::Result<Arc<Self>> {
        let len = len.max(2 * PAGE).next_multiple_of(PAGE);
        let file = memory_file("tenfold", len)?;
        // A peer that maps the file must never fault because it shrank.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mapping = Mapping::new(&file, len, ProtFlags::READ | ProtFlags::WRITE)?;
        mapping.header().magic.store(MAGIC, Ordering::Release);
        let free = Mutex::new(BTreeMap::from([(PAGE, len - PAGE)]));
        let (abandoned, regions, guard) = (AtomicBool::new(false), Regions::new(len), ForkGuard::new()?);
        Ok(Arc::new(Segment { mapping, file, free, abandoned, guard, regions }))
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.mapping.len
    }

    /// Has it no bytes?
    pub fn is_empty(&self) -> bool {
        self.mapping.len == 0
    }

    /// Shows peers that this process runs.
    pub fn beat(&self) {
        let pulse = &self.mapping.header().pulse;
        pulse.store(pulse.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// A descriptor with which a peer can map this memory, but not write it.
    pub fn share(&self) -> io::Result<OwnedFd> {
        reopen_for_reading(self.file.as_fd())
    }

    /// `len` bytes of this segment that are zero.
    pub fn allocate(self: &Arc<Self>, len: usize) -> io::Result<Block> {
        let rounded = len.max(1).next_multiple_of(PAGE);
        let mut free = self.free();
        let fit = free.iter().find(|(_, room)| **room >= rounded).map(|(&offset, &room)| (offset, room));
        let Some((offset, room)) = fit else {
            let message = format!("no {len} bytes left in a shared segment of {} bytes", self.len());
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, message));
        };
        free.remove(&offset);
        if room > rounded {
            free.insert(offset + rounded, room - rounded);
        }
        drop(free);
        Ok(Block { segment: Arc::clone(self), offset, len, rounded })
    }

    /// Where in this segment `bytes` lie, if they do.
    #[inline]
    pub fn offset_of(&self, bytes: Bytes<'_>) -> Option<usize> {
        let offset = (bytes.start() as usize).wrapping_sub(self.mapping.start.as_ptr() as usize);
        (offset <= self.mapping.len && bytes.len() <= self.mapping.len - offset).then_some(offset)
    }

    /// Gives `region` a place among this segment's offsets; `ended` is called with it when nothing points there any more.
    /// Nothing in it is lent before [`Lease::open`].
    ///
    /// # Errors
    /// If its memory is registered already, or too much is.
    pub fn register(
        self: &Arc<Self>,
        region: &Arc<Region>,
        ended: impl Fn(usize) + Send + Sync + 'static,
    ) -> io::Result<Arc<Lease>> {
        self.regions.register(Arc::downgrade(self), region, ended)
    }

    /// Where `bytes` lie in a registered region, if they do, and the lease to hold until peers have read them.
    #[inline]
    pub fn offset_in_region(&self, bytes: Bytes<'_>) -> Option<(usize, Arc<Lease>)> {
        self.regions.find(bytes)
    }

    pub(crate) fn regions(&self) -> &Regions {
        &self.regions
    }

    /// The owner is about to go: what peers have not read yet stays as it is for as long as they have it mapped.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Bytes that are allocated and not given back.
    pub fn used(&self) -> usize {
        self.len() - PAGE - self.free().values().sum::<usize>()
    }

    fn release(&self, offset: usize, len: usize) {
        // To a forked child the memory looks like its own, but it is the parent's.
        if self.is_abandoned() || !self.guard.is_same_process() {
            return;
        }
        // The next owner of this block expects zeroes, and the machine its memory.
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if rustix::fs::fallocate(self.file.as_fd(), hole, offset as u64, len as u64).is_err() {
            return; // Better lose the addresses than hand out dirty memory.
        }
        let mut free = self.free();
        let (mut offset, mut len) = (offset, len);
        if let Some(after) = free.remove(&(offset + len)) {
            len += after;
        }
        if let Some((&before, &room)) = free.range(..offset).next_back()
            && before + room == offset
        {
            (offset, len) = (before, len + room);
        }
        free.insert(offset, len);
    }

    fn free(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// An unnamed file in memory of `len` bytes, none of which exists until it is touched. It can be sealed.
pub(crate) fn memory_file(name: &str, len: usize) -> io::Result<OwnedFd> {
    // Beyond this limit the kernel does not only refuse: it sends SIGXFSZ, which kills a process that does not expect it.
    if let Some(limit) = getrlimit(Resource::Fsize).current
        && len as u64 > limit
    {
        let message = format!(
            "{len} bytes of shared memory exceed the limit of {limit} bytes for files (RLIMIT_FSIZE); raise it with `ulimit -f`"
        );
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // With `vm.memfd_noexec=2` files that may be executed are refused. Kernels before 6.3 do not know the flag.
    let file = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        made => made,
    }?;
    rustix::fs::ftruncate(&file, len as u64)?;
    Ok(file)
}

/// The same file, opened again: a duplicate would keep the right to write.
pub(crate) fn reopen_for_reading(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// A part of this process's segment; its memory goes back when it is dropped.
pub struct Block {
    segment: Arc<Segment>,
    offset: usize,
    len: usize,
    rounded: usize,
}

impl Block {
    pub(crate) fn start(&self) -> NonNull<u8> {
        // SAFETY: the block lies within the mapping.
        unsafe { self.segment.mapping.start.add(self.offset) }
    }

    /// Where it begins, as peers see it.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Has it no bytes?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The segment that it is part of.
    pub fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Its memory from `from` to `to`. A caller that gives parts of one block to several writers must not let them overlap.
    ///
    /// # Panics
    /// If that is not within the block.
    pub fn span(&self, from: usize, to: usize) -> Span<'_> {
        assert!(from <= to && to <= self.len, "{from}..{to} of a block of {} bytes", self.len);
        // SAFETY: the block lies within the mapping (checked by `allocate`), `to` within the block, and the mapping
        // lives as long as `self`.
        unsafe { Span::from_raw(self.segment.mapping.start.add(self.offset + from), to - from) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.segment.release(self.offset, self.rounded);
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({}..{})", self.offset, self.offset + self.len)
    }
}

/// Another rank's segment, which this one only reads, with the regions that the rank has made known.
#[derive(Debug)]
pub struct PeerSegment {
    memory: Memory,
    regions: PeerRegions,
}

enum Memory {
    /// Of another process, mapped read-only.
    Mapped(Mapping),
    /// Of a rank that is a thread of this process.
    Local(Arc<Segment>),
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Memory::Mapped(mapping) => write!(f, "Mapped({} bytes)", mapping.len),
            Memory::Local(segment) => write!(f, "Local({} bytes)", segment.len()),
        }
    }
}

impl PeerSegment {
    /// Maps the segment behind a descriptor that a peer sent.
    pub fn map(file: &OwnedFd) -> io::Result<Self> {
        // Without these seals the file could shrink under us, and reading it would kill this process.
        let seals = rustix::fs::fcntl_get_seals(file)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::SEAL) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer's segment is not sealed"));
        }
        let len = usize::try_from(rustix::fs::fstat(file)?.st_size).map_err(io::Error::other)?;
        if len < PAGE {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer's segment is too short"));
        }
        let mapping = Mapping::new(file, len, ProtFlags::READ)?;
        if mapping.header().magic.load(Ordering::Acquire) != MAGIC {
            let message = "the peer's segment has another layout: is it another version of tenfold?";
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        Ok(PeerSegment { memory: Memory::Mapped(mapping), regions: PeerRegions::default() })
    }

    /// The segment of a rank that is a thread of this process.
    pub fn local(segment: Arc<Segment>) -> Self {
        PeerSegment { memory: Memory::Local(segment), regions: PeerRegions::default() }
    }

    /// A number that changes as long as the peer's process runs.
    pub fn pulse(&self) -> u64 {
        self.mapping().header().pulse.load(Ordering::Relaxed)
    }

    /// The bytes from `offset`, if they lie within the segment.
    #[inline]
    pub fn bytes(&self, offset: usize, len: usize) -> Option<Bytes<'_>> {
        self.mapping().bytes(offset, len)
    }

    /// Makes a region of the peer's readable, from `offset` on.
    ///
    /// # Errors
    /// If the peer cannot have a region there, or has too many.
    pub fn add_region(&self, offset: usize, region: Arc<PeerRegion>) -> io::Result<()> {
        self.regions.add(offset, region, self.mapping().len)
    }

    /// Removes the region at `offset`, which the peer needs no longer. A reader keeps its mapping until it has finished.
    pub fn remove_region(&self, offset: usize) {
        self.regions.remove(offset);
    }

    /// The region in which `place` lies, and where it begins.
    pub(crate) fn region_at(&self, place: usize) -> Option<(usize, Arc<PeerRegion>)> {
        self.regions.find(place)
    }

    fn mapping(&self) -> &Mapping {
        match &self.memory {
            Memory::Mapped(mapping) => mapping,
            Memory::Local(segment) => &segment.mapping,
        }
    }
}

#[cfg(all(test, not(miri)))] // Miri has no memfd.
mod tests {
    use super::*;

    /// `dd` in a mapping's flags stands for "do not dump".
    #[test]
    fn a_segment_is_left_out_of_core_dumps() {
        let segment = Segment::new(3 * PAGE).unwrap();
        let address = segment.mapping.start().as_ptr() as usize;
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let is_it = |line: &&str| {
            let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
            let ends =
                range.map(|(start, end)| (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16)));
            matches!(ends, Some((Ok(start), Ok(end))) if (start..end).contains(&address))
        };
        let flags =
            maps.lines().skip_while(|line| !is_it(line)).find_map(|line| line.strip_prefix("VmFlags:"));
        assert!(flags.unwrap().split_whitespace().any(|flag| flag == "dd"), "{flags:?}");
    }

    #[test]
    fn blocks_do_not_overlap_and_freed_ones_are_found_again_and_clean() {
        let segment = Segment::new(17 * PAGE).unwrap();
        let first = segment.allocate(5 * PAGE).unwrap();
        let second = segment.allocate(1).unwrap();
        let third = segment.allocate(10 * PAGE).unwrap();
        assert_eq!((first.offset(), second.offset(), third.offset()), (PAGE, 6 * PAGE, 7 * PAGE));
        assert_eq!(segment.used(), 16 * PAGE);
        let error = segment.allocate(1).unwrap_err();
        assert_eq!(error.to_string(), "no 1 bytes left in a shared segment of 69632 bytes");

        second.span(0, 1).copy_from(Bytes::of(&[7]));
        drop(second);
        drop(first);
        let again = segment.allocate(6 * PAGE).unwrap();
        assert_eq!(again.offset(), PAGE);
        assert!(again.span(0, again.len()).bytes().to_vec().iter().all(|byte| *byte == 0));
        drop((again, third));
        assert_eq!(segment.used(), 0);
        assert_eq!(segment.free().len(), 1, "neighbours are joined");
    }

    #[test]
    fn a_peer_reads_what_the_owner_wrote_and_nothing_beyond_the_end() {
        let segment = Segment::new(4 * PAGE).unwrap();
        let block = segment.allocate(100).unwrap();
        block.span(0, 5).copy_from(Bytes::of(b"hello"));
        let peer = PeerSegment::map(&segment.share().unwrap()).unwrap();
        assert_eq!(peer.bytes(block.offset(), 5).unwrap().to_vec(), b"hello");
        assert!(peer.bytes(4 * PAGE - 1, 1).is_some());
        for (offset, len) in [(4 * PAGE, 1), (usize::MAX, 1), (1, usize::MAX), (0, 4 * PAGE + 1)] {
            assert!(peer.bytes(offset, len).is_none(), "{offset} + {len}");
        }
    }

    #[test]
    fn a_peer_cannot_write() {
        let segment = Segment::new(2 * PAGE).unwrap();
        let shared = segment.share().unwrap();
        assert!(Mapping::new(&shared, 2 * PAGE, ProtFlags::READ | ProtFlags::WRITE).is_err());
        assert!(rustix::io::write(&shared, b"x").is_err());
    }

    #[test]
    fn a_file_in_memory_can_never_be_executed() {
        if rustix::fs::memfd_create("probe", MemfdFlags::NOEXEC_SEAL).is_err() {
            return; // a kernel before 6.3
        }
        let segment = Segment::new(2 * PAGE).unwrap();
        let (_tensor, region) = crate::Buffer::in_file(crate::DType::U8, 1).unwrap();
        for file in [segment.file.as_fd(), region.as_fd()] {
            assert!(rustix::fs::fcntl_get_seals(file).unwrap().contains(SealFlags::EXEC));
            assert_eq!(rustix::fs::fstat(file).unwrap().st_mode & 0o111, 0);
        }
    }

    /// Why there is no `F_SEAL_FUTURE_WRITE`: if this fails, the kernel allows both, and the seal should be set.
    #[test]
    fn a_file_that_peers_cannot_open_for_writing_could_not_give_pages_back() {
        let file = memory_file("tenfold", 2 * PAGE).unwrap();
        let _own = Mapping::new(&file, 2 * PAGE, ProtFlags::READ | ProtFlags::WRITE).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
        assert!(Mapping::new(&file, 2 * PAGE, ProtFlags::READ | ProtFlags::WRITE).is_err());
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert_eq!(rustix::fs::fallocate(&file, hole, 0, PAGE as u64), Err(Errno::PERM));
    }

    #[test]
    fn a_file_that_may_shrink_is_refused() {
        let file = rustix::fs::memfd_create("mean", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        assert_eq!(PeerSegment::map(&file).unwrap_err().to_string(), "the peer's segment is not sealed");
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL).unwrap();
        let error = PeerSegment::map(&file).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the peer's segment has another layout: is it another version of tenfold?"
        );
    }

    #[test]
    fn memory_is_known_by_its_offset_wherever_a_span_of_it_went() {
        let segment = Segment::new(8 * PAGE).unwrap();
        let block = segment.allocate(2 * PAGE).unwrap();
        assert_eq!(segment.offset_of(block.span(10, 20).bytes()), Some(block.offset() + 10));
        assert_eq!(segment.offset_of(Bytes::of(&[1, 2, 3])), None);
    }
}
