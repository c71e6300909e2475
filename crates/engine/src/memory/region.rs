//! Large regions of memory for weights.
//!
//! Weights are read from end to end for every token, so the pages they lie on matter: with 4 KiB pages a
//! processor spends up to half its read bandwidth on address translation. On Linux a region asks for huge pages
//! (`madvise`, never `MAP_HUGETLB`, which escapes the usual meters) and falls back to what the system gives.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use crate::error::{Bytes, Error, Result};

/// Where weights start in a region: at a cache line.
pub const ALIGNMENT: usize = 64;

/// The pages a region asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PageSize {
    Usual,
    Huge,
}

/// Has the allocator keep little of what is freed, for the whole process: a program calls it when it starts. By default glibc gives
/// each thread a pool of its own and keeps up to 64 MiB of freed memory in each, which no budget knows of. Other allocators are
/// left alone.
pub fn keep_little_freed() {
    // SAFETY: it sets numbers of the allocator, under the allocator's own lock.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 4);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 1 << 20);
    }
}

/// Gives freed memory between pieces that are still in use back to the system, where the allocator is glibc's.
pub fn give_back_freed() {
    // SAFETY: it changes nothing but the allocator's own lists, under the allocator's own locks.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Owned bytes, zero at first.
pub struct Region(platform::Pages);

impl Region {
    /// A region of `len` bytes. Pages are taken from the system as they are written.
    ///
    /// # Errors
    /// If the system has no address space left.
    pub fn new(len: usize) -> Result<Region> {
        Region::on(len, PageSize::Huge)
    }

    /// A region of `len` bytes on pages of the usual size: for what is small, and given back when it is dropped.
    ///
    /// # Errors
    /// If the system has no address space left.
    pub fn small(len: usize) -> Result<Region> {
        Region::on(len, PageSize::Usual)
    }

    fn on(len: usize, size: PageSize) -> Result<Region> {
        let refused = |e| Error::Backend(format!("cannot reserve {} of memory: {e}", Bytes(len as u64)));
        platform::Pages::new(len, size).map(Region).map_err(refused)
    }

    /// Where the region starts, to write to parts of it that nobody else uses.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.first()
    }

    /// Takes the pages of a part from the system now, without changing what they hold. Taking them one by one
    /// as a drive writes to them is far slower. Where that cannot be done, nothing happens.
    pub fn populate(&self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len());
        self.0.populate(range);
    }

    /// Of a part, the pages that lie wholly in it and can be [given back](Self::give_back). Empty where the system takes none.
    pub fn whole_pages(&self, range: Range<usize>) -> Range<usize> {
        assert!(range.start <= range.end && range.end <= self.len());
        self.0.whole_pages(range)
    }

    /// Gives the [whole pages](Self::whole_pages) of a part back to the system. What they held is lost; they are zero when they
    /// are touched again. Returns how many bytes of them were in memory: a page that was never touched frees nothing. `None` if
    /// the system does not take them: then all stays as it was.
    ///
    /// # Safety
    /// Nobody may use the part, in the kernel either, until this returns.
    pub unsafe fn give_back(&self, range: Range<usize>) -> Option<usize> {
        let pages = self.whole_pages(range);
        // SAFETY: the caller's promise.
        if pages.is_empty() { None } else { unsafe { self.0.give_back(pages) } }
    }

    /// A part of the region, kept alive with it.
    pub fn share(self: &Arc<Self>, range: Range<usize>) -> SharedBytes {
        assert!(range.start <= range.end && range.end <= self.len());
        SharedBytes { region: Arc::clone(self), range }
    }
}

impl Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

/// A part of a [`Region`].
#[derive(Clone)]
pub struct SharedBytes {
    region: Arc<Region>,
    range: Range<usize>,
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.region[self.range.clone()]
    }
}

impl From<&[u8]> for SharedBytes {
    fn from(bytes: &[u8]) -> SharedBytes {
        let mut region = Region::new(bytes.len()).expect("a copy of what there is");
        region.copy_from_slice(bytes);
        Arc::new(region).share(0..bytes.len())
    }
}

#[cfg(target_os = "linux")]
mod platform {
    use std::ffi::c_void;
    use std::io;
    use std::ptr::NonNull;

    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

    use super::PageSize;

    /// What addresses of advice are multiples of; the largest page that is not huge.
    const PAGE: usize = 64 << 10;

    /// The size and alignment of a huge page.
    const HUGE: usize = 2 << 20;

    /// The size of a page that is not huge, on this machine.
    fn page_size() -> usize {
        // SAFETY: asks for a number.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(PAGE)
    }

    /// A private anonymous mapping, aligned to huge pages where it asks for them.
    pub struct Pages {
        mapping: NonNull<c_void>,
        mapped: usize,
        /// Where the aligned part starts in the mapping.
        start: usize,
        len: usize,
    }

    // SAFETY: the mapping is owned, like a boxed slice.
    unsafe impl Send for Pages {}
    // SAFETY: as above.
    unsafe impl Sync for Pages {}

    impl Pages {
        pub fn new(len: usize, size: PageSize) -> io::Result<Pages> {
            let mapped = match size {
                PageSize::Usual => Some(len.max(1)),
                PageSize::Huge => len.checked_next_multiple_of(HUGE).and_then(|len| len.checked_add(HUGE)),
            };
            let mapped = mapped.ok_or(io::ErrorKind::OutOfMemory)?;
            // SAFETY: a new mapping at an address of the system's choice touches no other memory.
            let mapping = unsafe {
                mmap_anonymous(
                    std::ptr::null_mut(),
                    mapped,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::PRIVATE,
                )?
            };
            let start = match size {
                PageSize::Usual => 0,
                PageSize::Huge => mapping.addr().next_multiple_of(HUGE) - mapping.addr(),
            };
            let mapping = NonNull::new(mapping).ok_or(io::ErrorKind::OutOfMemory)?;
            let pages = Pages { mapping, mapped, start, len };
            if size == PageSize::Usual {
                return Ok(pages);
            }
            // SAFETY: the advice is about the mapping just made, and changes no contents. It may be refused:
            // then pages are small.
            let _ = unsafe { madvise(pages.first().cast(), mapped - HUGE, Advice::LinuxHugepage) };
            Ok(pages)
        }

        pub fn bytes(&self) -> &[u8] {
            // SAFETY: the mapping is readable, initialised by the system, and lives as long as `self`.
            unsafe { std::slice::from_raw_parts(self.first(), self.len) }
        }

        pub fn bytes_mut(&mut self) -> &mut [u8] {
            // SAFETY: as above, and borrowed exclusively.
            unsafe { std::slice::from_raw_parts_mut(self.first(), self.len) }
        }

        pub fn populate(&self, range: std::ops::Range<usize>) {
            let start = range.start / PAGE * PAGE;
            let len = range.end.next_multiple_of(PAGE).min(self.mapped - self.start) - start;
            // SAFETY: the range lies in the mapping, and populating changes no contents. It may be refused by an
            // older kernel or for want of memory: then pages are taken as they are written.
            let _ =
                unsafe { madvise(self.first().wrapping_add(start).cast(), len, Advice::LinuxPopulateWrite) };
        }

        pub fn whole_pages(&self, range: std::ops::Range<usize>) -> std::ops::Range<usize> {
            let page = page_size();
            range.start.next_multiple_of(page)..range.end / page * page
        }

        /// Gives whole pages back; `None` if that is refused.
        ///
        /// # Safety
        /// Nobody may use the range.
        pub unsafe fn give_back(&self, pages: std::ops::Range<usize>) -> Option<usize> {
            let resident = self.resident(pages.clone());
            // SAFETY: the range lies in the mapping, and nobody uses it, by the caller's promise. If it is refused,
            // the pages stay.
            let taken = unsafe {
                madvise(self.first().wrapping_add(pages.start).cast(), pages.len(), Advice::LinuxDontNeed)
            };
            taken.ok().map(|()| resident)
        }

        /// Bytes of whole pages that are in memory.
        fn resident(&self, pages: std::ops::Range<usize>) -> usize {
            let page = page_size();
            let mut there = vec![0u8; pages.len() / page];
            // SAFETY: the range lies in the mapping, starts with a page, and has as many of them as there are bytes to write.
            let told = unsafe {
                libc::mincore(self.first().wrapping_add(pages.start).cast(), pages.len(), there.as_mut_ptr())
            };
            if told != 0 {
                return 0;
            }
            page * there.iter().filter(|&&page| page & 1 == 1).count()
        }

        pub fn first(&self) -> *mut u8 {
            // The aligned part lies inside the mapping.
            self.mapping.as_ptr().cast::<u8>().wrapping_add(self.start)
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: the mapping is owned, and nothing borrows from it any more.
            let unmapped = unsafe { munmap(self.mapping.as_ptr(), self.mapped) };
            debug_assert!(unmapped.is_ok());
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod platform {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::io;
    use std::ptr::NonNull;

    /// What direct reads ask for.
    const PAGE: usize = 4096;

    /// Memory of the global allocator.
    pub struct Pages {
        first: NonNull<u8>,
        layout: Layout,
        len: usize,
    }

    // SAFETY: the memory is owned, like a boxed slice.
    unsafe impl Send for Pages {}
    // SAFETY: as above.
    unsafe impl Sync for Pages {}

    impl Pages {
        pub fn new(len: usize, _: super::PageSize) -> io::Result<Pages> {
            let layout = Layout::from_size_align(len.max(1), PAGE).map_err(|_| io::ErrorKind::OutOfMemory)?;
            // SAFETY: the layout has a size.
            let first = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(io::ErrorKind::OutOfMemory)?;
            Ok(Pages { first, layout, len })
        }

        pub fn populate(&self, _: std::ops::Range<usize>) {}

        /// None: the allocator takes nothing back in pieces.
        pub fn whole_pages(&self, range: std::ops::Range<usize>) -> std::ops::Range<usize> {
            range.start..range.start
        }

        /// # Safety
        /// None, since nothing happens.
        pub unsafe fn give_back(&self, _: std::ops::Range<usize>) -> Option<usize> {
            None
        }

        pub fn first(&self) -> *mut u8 {
            self.first.as_ptr()
        }

        pub fn bytes(&self) -> &[u8] {
            // SAFETY: the memory is initialised, and lives as long as `self`.
            unsafe { std::slice::from_raw_parts(self.first(), self.len) }
        }

        pub fn bytes_mut(&mut self) -> &mut [u8] {
            // SAFETY: as above, and borrowed exclusively.
            unsafe { std::slice::from_raw_parts_mut(self.first(), self.len) }
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: it was allocated with this layout, and nothing borrows from it any more.
            unsafe { dealloc(self.first(), self.layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_holds_what_is_written() {
        for len in [0, 1, 4096, (2 << 20) + 1] {
            let mut region = Region::new(len).unwrap();
            assert_eq!(region.len(), len);
            assert!(region.iter().all(|&b| b == 0));
            region.iter_mut().enumerate().for_each(|(i, b)| *b = i as u8);
            let region = Arc::new(region);
            let part = region.share(len / 2..len);
            drop(region);
            assert!(part.iter().enumerate().all(|(i, &b)| b == (len / 2 + i) as u8));
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn pages_that_are_given_back_are_zero_and_their_neighbours_are_not() {
        let mut region = Region::new(4 << 20).unwrap();
        region.fill(7);
        let pages = region.whole_pages((1 << 20) + 1..3 << 20);
        assert!(pages.start > 1 << 20 && pages.start <= 2 << 20 && pages.end == 3 << 20);
        // SAFETY: nobody else uses the region.
        let freed = unsafe { region.give_back((1 << 20) + 1..3 << 20) };
        assert_eq!(freed, Some(pages.len()), "all of them had been written to");
        assert!(region[..(1 << 20) + 1].iter().all(|&b| b == 7));
        assert!(region[2 << 20..3 << 20].iter().all(|&b| b == 0));
        assert!(region[3 << 20..].iter().all(|&b| b == 7));
        region.populate(0..4 << 20);
        assert!(region[3 << 20..].iter().all(|&b| b == 7));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn pages_that_were_never_touched_free_nothing() {
        let region = Region::new(64 << 20).unwrap();
        // SAFETY: nobody else uses the region.
        unsafe {
            assert_eq!(region.give_back(0..64 << 20), Some(0));
            assert_eq!(region.give_back(1..2), None, "there is no whole page in it");
        }
    }

    #[test]
    fn more_than_there_is_address_space_is_an_error() {
        assert!(Region::new(usize::MAX).is_err());
        assert!(Region::new(1 << 60).is_err());
    }
}
