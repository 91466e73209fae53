//! Shared memory that another library made, lent to peers as if it lay in the segment.
//!
//! PyTorch's shared storages are files in memory that this process has mapped already. A [`Region`] is such a file with the
//! addresses at which it is mapped here. When a region is registered with a segment, it gets a range of offsets beyond the
//! segment's end, so that a message names its bytes as it names all others. The peer has mapped the same file
//! ([`PeerRegion`]) and keeps it under the same offset. No offset is given twice: a message that points into a region that
//! was removed has no bytes. It never gets the bytes of another region.
//!
//! A [`Lease`] exists as long as its registration or a message that points into it. When the lease is dropped, peers are
//! asked to forget the region. A reader holds the mapping that it reads (see `Link::peek`), so a peer that breaks this rule
//! causes an error here and not an invalid read.
//!
//! A segment is sealed. Such a file is not, because POSIX shared memory cannot be sealed: a process that has it open for
//! writing can shorten it, and a process that then reads the lost pages is killed by SIGBUS. The processes of a job belong to
//! one user and could kill each other anyway, so this is not prevented. The only check is that the file is long enough when
//! it is mapped.
//!
//! Not here: how a region is made known to peers (see `fabric::regions` of the runtime).

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::mm::ProtFlags;

use crate::segment::{Mapping, PAGE, reopen_for_reading};
use crate::{Bytes, Segment};

/// Regions of one rank at a time. Each is a mapping in every process of the host, of which Linux allows 65,530.
pub const REGIONS_MAX: usize = 512;

/// Bytes of all regions of one rank: addresses that every peer has to find for them.
pub const REGION_BYTES_MAX: usize = 1 << 40;

/// Which file it is, the same in every process of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    /// The device that the file is on.
    pub device: u64,
    /// The number of the file there.
    pub inode: u64,
}

impl FileIdentity {
    fn of(file: BorrowedFd<'_>) -> io::Result<Self> {
        let facts = rustix::fs::fstat(file)?;
        Ok(FileIdentity { device: facts.st_dev, inode: facts.st_ino })
    }
}

/// A shared file as this process has mapped it, from its beginning.
pub struct Region {
    /// Compared with addresses of tensors, never followed.
    start: usize,
    file: OwnedFd,
    identity: FileIdentity,
    /// How ranks that are threads of this process read it, as a peer would: it stays mapped as long as they need it.
    readable: Arc<PeerRegion>,
    _keep: Box<dyn Any + Send + Sync>,
}

impl Region {
    /// The `len` bytes from `start`. `file` is opened again for reading and need not stay open. `keep` is dropped with the
    /// region and may be what keeps the memory mapped. It is dropped on the thread that ends the region's last use, so its
    /// `drop` must not wait for a group.
    ///
    /// # Safety
    /// As long as the region is registered with a group, the `len` bytes from `start` are a shared mapping of `file`
    /// from its beginning, and no process makes the file shorter than that.
    ///
    /// # Errors
    /// If the file is shorter than `len`, or cannot be mapped for reading.
    pub unsafe fn new(
        start: NonNull<u8>,
        len: usize,
        file: impl AsFd,
        keep: impl Any + Send + Sync,
    ) -> io::Result<Arc<Self>> {
        let file = reopen_for_reading(file.as_fd())?;
        let identity = FileIdentity::of(file.as_fd())?;
        let readable = PeerRegion::map(&file, len, identity)?;
        let start = start.as_ptr().addr();
        Ok(Arc::new(Region { start, file, identity, readable, _keep: Box::new(keep) }))
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.readable.len()
    }

    /// Has it no bytes?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Which file it is.
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// What a rank that is a thread of this process reads.
    pub fn readable(&self) -> &Arc<PeerRegion> {
        &self.readable
    }
}

/// A descriptor with which peers can map the file, but not write it.
impl AsFd for Region {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes at {:#x})", self.len(), self.start)
    }
}

/// A region of another rank, mapped read-only.
pub struct PeerRegion {
    mapping: Mapping,
}

impl PeerRegion {
    /// Maps the first `len` bytes of a file that a peer sent and said to be `identity`.
    pub fn map(file: impl AsFd, len: usize, identity: FileIdentity) -> io::Result<Arc<Self>> {
        let invalid = |message: String| Err(io::Error::new(io::ErrorKind::InvalidData, message));
        let file = file.as_fd();
        if FileIdentity::of(file)? != identity {
            return invalid("the descriptor is of another file".to_string());
        }
        let size = usize::try_from(rustix::fs::fstat(file)?.st_size).map_err(io::Error::other)?;
        if len == 0 || size < len {
            return invalid(format!("a file of {size} bytes has no region of {len} bytes"));
        }
        Ok(Arc::new(PeerRegion { mapping: Mapping::new(file, len, ProtFlags::READ)? }))
    }

    fn len(&self) -> usize {
        self.mapping.len()
    }

    /// The bytes from `at`, if they lie within the region.
    pub(crate) fn bytes(&self, at: usize, len: usize) -> Option<Bytes<'_>> {
        self.mapping.bytes(at, len)
    }
}

impl fmt::Debug for PeerRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerRegion({} bytes)", self.len())
    }
}

/// A region as one segment lends from it.
pub struct Lease {
    region: Arc<Region>,
    offset: usize,
    segment: Weak<Segment>,
    ended: Box<dyn Fn(usize) + Send + Sync>,
}

impl Lease {
    /// Where the region begins, as peers see it.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The region that is lent from.
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// From here on bytes in the region are found: all peers can read them.
    pub fn open(self: &Arc<Self>) {
        if let Some(segment) = self.segment.upgrade() {
            segment.regions().open(self);
        }
    }

    /// Bytes in the region are no longer found. What points there already stays readable.
    pub fn close(&self) {
        if let Some(segment) = self.segment.upgrade() {
            segment.regions().close(self);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(segment) = self.segment.upgrade() {
            segment.regions().forget(self);
        }
        (self.ended)(self.offset);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({:?} as {})", self.region, self.offset)
    }
}

/// The regions of one segment.
pub(crate) struct Regions {
    /// How many are open. A process without regions pays only for a load of this number.
    open: AtomicUsize,
    table: Mutex<Table>,
}

struct Table {
    /// The next offset to give.
    next: usize,
    /// By first address.
    registered: BTreeMap<usize, Registered>,
    /// Leases that exist, also of regions that are registered no longer, and their bytes.
    leases: usize,
    bytes: usize,
}

struct Registered {
    len: usize,
    offset: usize,
    open: Option<Arc<Lease>>,
}

impl Table {
    /// The entry of `lease`. Returns `None` if the lease was closed, also if the same memory was registered again since.
    fn of(&mut self, lease: &Lease) -> Option<&mut Registered> {
        self.registered.get_mut(&lease.region.start).filter(|registered| registered.offset == lease.offset)
    }

    /// The entry must be dropped without the lock on the table: the lease in it may be the last, and takes that lock.
    fn remove(&mut self, lease: &Lease) -> Option<Registered> {
        self.of(lease)?;
        self.registered.remove(&lease.region.start)
    }
}

impl Regions {
    /// Of a segment of `len` bytes.
    pub(crate) fn new(len: usize) -> Self {
        let table = Table { next: len + PAGE, registered: BTreeMap::new(), leases: 0, bytes: 0 };
        Regions { open: AtomicUsize::new(0), table: Mutex::new(table) }
    }

    pub(crate) fn register(
        &self,
        segment: Weak<Segment>,
        region: &Arc<Region>,
        ended: impl Fn(usize) + Send + Sync + 'static,
    ) -> io::Result<Arc<Lease>> {
        let (start, len) = (region.start, region.len());
        let mut table = self.table();
        let before = table.registered.range(..start.saturating_add(len)).next_back();
        if before.is_some_and(|(other, registered)| start < other + registered.len) {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the memory is registered already"));
        }
        let full = |message| Err(io::Error::new(io::ErrorKind::QuotaExceeded, message));
        if table.leases >= REGIONS_MAX {
            return full(format!("{REGIONS_MAX} regions are registered already"));
        }
        if len > REGION_BYTES_MAX - table.bytes {
            return full(format!("{} bytes are registered already, of {REGION_BYTES_MAX}", table.bytes));
        }
        let offset = table.next;
        // A page between two regions, so that nothing reaches from one into the next.
        let Some(next) = offset.checked_add(len.next_multiple_of(PAGE) + PAGE) else {
            return full("all offsets have been given".to_string());
        };
        table.next = next;
        table.leases += 1;
        table.bytes += len;
        table.registered.insert(start, Registered { len, offset, open: None });
        Ok(Arc::new(Lease { region: Arc::clone(region), offset, segment, ended: Box::new(ended) }))
    }

    /// The offset of bytes that lie in an open region, and its lease, to be held until they were read.
    #[inline]
    pub(crate) fn find(&self, bytes: Bytes<'_>) -> Option<(usize, Arc<Lease>)> {
        // Relaxed: who lends memory has heard that it is registered, and so sees this count too.
        if self.open.load(Ordering::Relaxed) == 0 { None } else { self.find_in_table(bytes) }
    }

    fn find_in_table(&self, bytes: Bytes<'_>) -> Option<(usize, Arc<Lease>)> {
        let address = bytes.start().addr();
        let table = self.table();
        let (start, Registered { len, offset, open }) = table.registered.range(..=address).next_back()?;
        let (at, lease) = (address - start, open.as_ref()?);
        (at <= *len && bytes.len() <= len - at).then(|| (offset + at, Arc::clone(lease)))
    }

    fn open(&self, lease: &Arc<Lease>) {
        if let Some(registered) = self.table().of(lease)
            && registered.open.is_none()
        {
            registered.open = Some(Arc::clone(lease));
            self.open.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn close(&self, lease: &Lease) {
        let removed = self.table().remove(lease);
        if removed.is_some_and(|registered| registered.open.is_some()) {
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn forget(&self, lease: &Lease) {
        let mut table = self.table();
        let removed = table.remove(lease);
        assert!(removed.is_none_or(|registered| registered.open.is_none()), "an open region has a lease");
        table.leases -= 1;
        table.bytes -= lease.region.len();
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The regions of another rank that this one can read, by offset.
#[derive(Debug, Default)]
pub(crate) struct PeerRegions(Mutex<BTreeMap<usize, Arc<PeerRegion>>>);

impl PeerRegions {
    /// Makes a region readable from `offset` on, which lies beyond `end` of the peer's segment.
    pub(crate) fn add(&self, offset: usize, region: Arc<PeerRegion>, end: usize) -> io::Result<()> {
        let refuse = |message: &str| Err(io::Error::new(io::ErrorKind::InvalidData, message));
        let mut regions = self.regions();
        let Some(after) = offset.checked_add(region.len()).filter(|_| offset >= end) else {
            return refuse("the region's offset lies in the segment");
        };
        let before = regions.range(..after).next_back();
        if before.is_some_and(|(other, region)| offset < other + region.len()) {
            return refuse("the region's offset lies in another region");
        }
        let bytes: usize = regions.values().map(|region| region.len()).sum();
        if regions.len() >= REGIONS_MAX || region.len() > REGION_BYTES_MAX.saturating_sub(bytes) {
            return refuse("the peer has more regions than it may");
        }
        regions.insert(offset, region);
        Ok(())
    }

    /// The region that begins at `offset` is no longer readable.
    pub(crate) fn remove(&self, offset: usize) {
        let removed = self.regions().remove(&offset);
        drop(removed); // unmapped without the lock
    }

    /// The region in which `place` lies, and where it begins.
    pub(crate) fn find(&self, place: usize) -> Option<(usize, Arc<PeerRegion>)> {
        let regions = self.regions();
        let (offset, region) = regions.range(..=place).next_back()?;
        (place - offset < region.len()).then(|| (*offset, Arc::clone(region)))
    }

    fn regions(&self) -> MutexGuard<'_, BTreeMap<usize, Arc<PeerRegion>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, not(miri)))] // Miri has no memfd.
#[expect(clippy::unwrap_used, reason = "a test may")]
mod tests {
    use super::*;
    use crate::{Buffer, DType, PeerSegment};

    fn file(bytes: usize) -> (Buffer, Arc<Region>) {
        Buffer::in_file(DType::U8, bytes).unwrap()
    }

    /// A rank and a peer of it, which has mapped its segment.
    fn pair() -> (Arc<Segment>, PeerSegment) {
        let segment = Segment::new(4 * PAGE).unwrap();
        let peer = PeerSegment::map(&segment.share().unwrap()).unwrap();
        (segment, peer)
    }

    /// What a peer does when it hears of a region.
    fn announce(lease: &Lease, peer: &PeerSegment) -> io::Result<()> {
        let region = lease.region();
        peer.add_region(lease.offset(), PeerRegion::map(region, region.len(), region.identity())?)
    }

    fn read(peer: &PeerSegment, place: usize, len: usize) -> Option<Vec<u8>> {
        let (offset, region) = peer.region_at(place)?;
        region.bytes(place - offset, len).map(|bytes| bytes.to_vec())
    }

    #[test]
    fn bytes_of_a_region_are_found_once_it_is_open_and_a_peer_reads_them_there() {
        let ((segment, peer), (mut tensor, region)) = (pair(), file(2 * PAGE + 100));
        let lease = segment.register(&region, |_| ()).unwrap();
        assert!(lease.offset() >= segment.len(), "beyond all that lies in the segment");
        announce(&lease, &peer).unwrap();
        tensor.as_mut_bytes()[PAGE..PAGE + 5].copy_from_slice(b"hello");
        assert!(segment.offset_in_region(Bytes::of(tensor.as_bytes())).is_none(), "not all peers know it");
        lease.open();
        let (place, found) = segment.offset_in_region(Bytes::of(&tensor.as_bytes()[PAGE..])).unwrap();
        assert_eq!((place, found.offset()), (lease.offset() + PAGE, lease.offset()));
        assert_eq!(read(&peer, place, 5).unwrap(), b"hello");
        assert!(segment.offset_in_region(Bytes::of(&[0; 100])).is_none(), "other memory is not in it");
        assert_eq!(segment.offset_of(Bytes::of(tensor.as_bytes())), None, "nor is it in the segment");
    }

    #[test]
    fn nothing_reaches_beyond_a_region() {
        let ((segment, peer), (_tensor, region)) = (pair(), file(PAGE + 10));
        let lease = segment.register(&region, |_| ()).unwrap();
        announce(&lease, &peer).unwrap();
        let end = lease.offset() + PAGE + 10;
        assert!(read(&peer, lease.offset(), PAGE + 10).is_some());
        assert!(read(&peer, end - 1, 1).is_some());
        for (place, len) in
            [(end - 1, 2), (end, 1), (lease.offset() - 1, 1), (lease.offset(), usize::MAX), (usize::MAX, 1)]
        {
            assert!(read(&peer, place, len).is_none(), "{place} + {len}");
        }
    }

    #[test]
    fn bytes_that_begin_in_a_region_and_end_behind_it_are_not_lent() {
        let (segment, (mut tensor, region)) = (pair().0, file(100));
        let lease = segment.register(&region, |_| ()).unwrap();
        lease.open();
        let view = tensor.lend();
        let page = view.span().start();
        // SAFETY: a mapping is whole pages long.
        let beyond = unsafe { Bytes::from_raw(NonNull::new(page.add(50)).unwrap(), 51) };
        assert!(segment.offset_in_region(beyond).is_none());
        assert!(segment.offset_in_region(beyond.part(0, 50)).is_some());
    }

    #[test]
    fn a_closed_region_is_not_found_and_its_offsets_are_never_given_again() {
        let ((segment, peer), (tensor, region)) = (pair(), file(PAGE));
        let mut offsets = Vec::new();
        for _ in 0..3 {
            let lease = segment.register(&region, |_| ()).unwrap();
            announce(&lease, &peer).unwrap();
            lease.open();
            lease.close();
            assert!(segment.offset_in_region(Bytes::of(tensor.as_bytes())).is_none());
            assert!(read(&peer, lease.offset(), 1).is_some(), "what was sent before may still be read");
            peer.remove_region(lease.offset());
            assert!(read(&peer, lease.offset(), 1).is_none(), "and not after that");
            offsets.push(lease.offset());
        }
        assert!(offsets.is_sorted_by(|one, next| one + PAGE <= *next), "{offsets:?}");
        assert!(offsets.iter().all(|offset| read(&peer, *offset, 1).is_none()));
    }

    #[test]
    fn a_lease_ends_when_the_last_message_that_points_there_was_read() {
        let (segment, (tensor, region)) = (pair().0, file(PAGE));
        let (sender, ended) = std::sync::mpsc::channel();
        let lease = segment.register(&region, move |offset| sender.send(offset).unwrap()).unwrap();
        let offset = lease.offset();
        lease.open();
        let (_, lent) = segment.offset_in_region(Bytes::of(tensor.as_bytes())).unwrap();
        lease.close();
        drop(lease);
        assert!(ended.try_recv().is_err(), "it is still lent");
        let again = segment.register(&region, |_| ()).unwrap();
        again.open();
        drop(lent);
        assert_eq!(ended.try_recv(), Ok(offset));
        assert!(segment.offset_in_region(Bytes::of(tensor.as_bytes())).is_some(), "the other one goes on");
    }

    #[test]
    fn memory_is_registered_once_at_a_time() {
        let (segment, (_tensor, region)) = (pair().0, file(PAGE));
        let lease = segment.register(&region, |_| ()).unwrap();
        let error = segment.register(&region, |_| ()).unwrap_err();
        assert_eq!(error.to_string(), "the memory is registered already");
        drop(lease);
        assert!(segment.register(&region, |_| ()).is_ok(), "one that never opened leaves nothing behind");
        assert!(pair().0.register(&region, |_| ()).is_ok(), "every segment may lend from it");
    }

    #[test]
    fn the_number_of_regions_is_limited_on_both_sides() {
        let (segment, peer) = pair();
        let files: Vec<_> = (0..=REGIONS_MAX).map(|_| file(1)).collect();
        let leases: Vec<_> =
            files[1..].iter().map(|(_, region)| segment.register(region, |_| ()).unwrap()).collect();
        let error = segment.register(&files[0].1, |_| ()).unwrap_err();
        assert_eq!(error.to_string(), "512 regions are registered already");
        leases.iter().for_each(|lease| announce(lease, &peer).unwrap());
        let one_more = leases[REGIONS_MAX - 1].offset() + 2 * PAGE;
        let error = peer.add_region(one_more, Arc::clone(files[0].1.readable())).unwrap_err();
        assert_eq!(error.to_string(), "the peer has more regions than it may");
    }

    #[test]
    fn a_peer_cannot_put_a_region_over_its_segment_or_over_another() {
        let ((segment, peer), (_tensor, region)) = (pair(), file(2 * PAGE));
        let add = |offset| peer.add_region(offset, Arc::clone(region.readable()));
        for offset in [0, segment.len() - 1, usize::MAX] {
            assert_eq!(add(offset).unwrap_err().to_string(), "the region's offset lies in the segment");
        }
        add(8 * PAGE).unwrap();
        for offset in [6 * PAGE + 1, 8 * PAGE, 10 * PAGE - 1] {
            assert_eq!(add(offset).unwrap_err().to_string(), "the region's offset lies in another region");
        }
        add(6 * PAGE).unwrap();
        add(10 * PAGE).unwrap();
    }

    #[test]
    fn a_file_that_is_too_short_or_another_is_refused() {
        let ((_short, short), (_other, other)) = (file(10), file(10));
        let error = PeerRegion::map(&short, 11, short.identity()).unwrap_err();
        assert_eq!(error.to_string(), "a file of 10 bytes has no region of 11 bytes");
        let error = PeerRegion::map(&short, 10, other.identity()).unwrap_err();
        assert_eq!(error.to_string(), "the descriptor is of another file");
        assert!(PeerRegion::map(&short, 0, short.identity()).is_err(), "nothing to map");
    }

    #[test]
    fn posix_shared_memory_can_be_lent_after_its_name_was_removed() {
        // What `shm_open` opens, and what PyTorch's storages are.
        let name = format!("/dev/shm/tenfold-test-{}", std::process::id());
        let file = std::fs::File::options().read(true).write(true).create_new(true).open(&name).unwrap();
        std::fs::remove_file(&name).unwrap();
        file.set_len(PAGE as u64).unwrap();
        let mapping = Mapping::new(&file, PAGE, ProtFlags::READ | ProtFlags::WRITE).unwrap();
        // SAFETY: mapped in the line above, from this file, until the end of the test.
        let region = unsafe { Region::new(mapping.start(), PAGE, &file, ()) }.unwrap();
        drop(file);
        let (segment, peer) = pair();
        let lease = segment.register(&region, |_| ()).unwrap();
        announce(&lease, &peer).unwrap();
        lease.open();
        let (place, _lease) = segment.offset_in_region(mapping.bytes(PAGE - 5, 5).unwrap()).unwrap();
        // SAFETY: the last five bytes of the mapping, which no other code reads now.
        let target = unsafe { crate::Span::from_raw(mapping.start().add(PAGE - 5), 5) };
        target.copy_from(Bytes::of(b"hello"));
        assert_eq!(read(&peer, place, 5).unwrap(), b"hello");
    }

    #[test]
    fn whoever_has_the_descriptor_of_a_region_can_only_read_it() {
        let (_tensor, region) = file(PAGE);
        assert!(rustix::io::write(&region, b"x").is_err());
        assert!(Mapping::new(&region, PAGE, ProtFlags::READ | ProtFlags::WRITE).is_err());
    }
}
