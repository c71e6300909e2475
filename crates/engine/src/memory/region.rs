//! Large regions of memory for weights.
//!
//! All weights are read for every token, so page size matters: with pages of 4 KiB a CPU spends up to half its read
//! bandwidth on address translation. On Linux a region requests huge pages (with `madvise`, never `MAP_HUGETLB`,
//! which resident-memory counters miss) and works with whatever pages it gets.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use crate::error::{Bytes, Error, Result};

/// The alignment of weights in a region: a cache line.
pub const ALIGNMENT: usize = 64;

/// The pages that a region requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PageSize {
    Usual,
    Huge,
}

/// Makes the allocator keep little freed memory, for the whole process; a program calls it at start. By default,
/// glibc has a pool per thread and keeps up to 64 MiB of freed memory in each, outside any budget. Other allocators
/// are not changed.
pub fn keep_little_freed() {
    // SAFETY: it sets parameters of the allocator, under the allocator's own lock.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 4);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 1 << 20);
    }
}

/// Returns freed memory between live allocations to the operating system, if the allocator is glibc's.
pub fn give_back_freed() {
    // SAFETY: it changes only the allocator's lists, under the allocator's own locks.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Owned bytes, initially zero.
pub struct Region(platform::Pages);

impl Region {
    /// A region of `len` bytes. Pages become resident when they are written.
    ///
    /// # Errors
    /// If the address space is exhausted.
    pub fn new(len: usize) -> Result<Region> {
        Region::on(len, PageSize::Huge)
    }

    /// A region of `len` bytes on pages of the usual size, for small and short-lived data.
    ///
    /// # Errors
    /// If the address space is exhausted.
    pub fn small(len: usize) -> Result<Region> {
        Region::on(len, PageSize::Usual)
    }

    fn on(len: usize, size: PageSize) -> Result<Region> {
        let refused = |e| Error::Backend(format!("cannot reserve {} of memory: {e}", Bytes(len as u64)));
        platform::Pages::new(len, size).map(Region).map_err(refused)
    }

    /// The start of the region, for writing to parts of it that nobody else uses.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.first()
    }

    /// Makes the pages of a part resident now, without changing their contents. This is far faster than doing it page
    /// by page while a drive writes to them. Does nothing if the system does not support it.
    pub fn populate(&self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.len());
        self.0.populate(range);
    }

    /// The pages that lie entirely in a part and can be [given back](Self::give_back). Empty if the system cannot
    /// take pages back.
    pub fn whole_pages(&self, range: Range<usize>) -> Range<usize> {
        assert!(range.start <= range.end && range.end <= self.len());
        self.0.whole_pages(range)
    }

    /// Gives the [whole pages](Self::whole_pages) of a part back to the operating system. Their contents are lost;
    /// they are zero when touched again. Returns how many of their bytes were resident. Returns `None`, and changes
    /// nothing, if the system refuses.
    ///
    /// # Safety
    /// Nobody may use the part, not even the kernel, until this returns.
    pub unsafe fn give_back(&self, range: Range<usize>) -> Option<usize> {
        let pages = self.whole_pages(range);
        // SAFETY: promised by the caller.
        if pages.is_empty() { None } else { unsafe { self.0.give_back(pages) } }
    }

    /// A part of the region. It keeps the region alive.
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

impl SharedBytes {
    /// These bytes and those that follow them in their region, `most` at most.
    pub fn extended(&self, most: usize) -> SharedBytes {
        let end = self.region.len().min(self.range.start + most).max(self.range.end);
        self.region.share(self.range.start..end)
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.region[self.range.clone()]
    }
}

impl From<&[u8]> for SharedBytes {
    fn from(bytes: &[u8]) -> SharedBytes {
        let mut region = Region::new(bytes.len()).expect("a copy of bytes in memory");
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

    /// The unit of `madvise` calls: the largest page that is not huge.
    const PAGE: usize = 64 << 10;

    /// The size and alignment of a huge page.
    const HUGE: usize = 2 << 20;

    /// The size of the machine's usual pages.
    fn page_size() -> usize {
        // SAFETY: only reads a number.
        let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(PAGE)
    }

    /// A private anonymous mapping, aligned to huge pages if it requests them.
    pub struct Pages {
        mapping: NonNull<c_void>,
        mapped: usize,
        /// The offset of the aligned part in the mapping.
        start: usize,
        len: usize,
    }

    // SAFETY: it owns the mapping, like a boxed slice.
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
            // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
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
            // SAFETY: the advice concerns the mapping just made and changes no contents. If the kernel refuses, pages
            // are small.
            let _ = unsafe { madvise(pages.first().cast(), mapped - HUGE, Advice::LinuxHugepage) };
            Ok(pages)
        }

        pub fn bytes(&self) -> &[u8] {
            // SAFETY: the mapping is readable, initialised by the kernel, and lives as long as `self`.
            unsafe { std::slice::from_raw_parts(self.first(), self.len) }
        }

        pub fn bytes_mut(&mut self) -> &mut [u8] {
            // SAFETY: as above, and borrowed exclusively.
            unsafe { std::slice::from_raw_parts_mut(self.first(), self.len) }
        }

        pub fn populate(&self, range: std::ops::Range<usize>) {
            let start = range.start / PAGE * PAGE;
            let len = range.end.next_multiple_of(PAGE).min(self.mapped - self.start) - start;
            // SAFETY: the range is in the mapping, and populating changes no contents. An older kernel, or one short
            // of memory, may refuse; pages then become resident when written.
            let _ =
                unsafe { madvise(self.first().wrapping_add(start).cast(), len, Advice::LinuxPopulateWrite) };
        }

        pub fn whole_pages(&self, range: std::ops::Range<usize>) -> std::ops::Range<usize> {
            let page = page_size();
            range.start.next_multiple_of(page)..range.end / page * page
        }

        /// Gives whole pages back; `None` if the kernel refuses.
        ///
        /// # Safety
        /// Nobody may use the range.
        pub unsafe fn give_back(&self, pages: std::ops::Range<usize>) -> Option<usize> {
            let resident = self.resident(pages.clone());
            // SAFETY: the range is in the mapping, and the caller promises that nobody uses it. If the kernel
            // refuses, the pages stay.
            let taken = unsafe {
                madvise(self.first().wrapping_add(pages.start).cast(), pages.len(), Advice::LinuxDontNeed)
            };
            taken.ok().map(|()| resident)
        }

        /// Bytes of whole pages that are resident.
        fn resident(&self, pages: std::ops::Range<usize>) -> usize {
            let page = page_size();
            let mut flags = vec![0u8; pages.len() / page];
            // SAFETY: the range is in the mapping and starts at a page, and the vector has one byte for each of its
            // pages.
            let status = unsafe {
                libc::mincore(self.first().wrapping_add(pages.start).cast(), pages.len(), flags.as_mut_ptr())
            };
            if status != 0 {
                return 0;
            }
            page * flags.iter().filter(|&&page| page & 1 == 1).count()
        }

        pub fn first(&self) -> *mut u8 {
            // The aligned part is inside the mapping.
            self.mapping.as_ptr().cast::<u8>().wrapping_add(self.start)
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: it owns the mapping, and nothing borrows from it any more.
            let unmapped = unsafe { munmap(self.mapping.as_ptr(), self.mapped) };
            debug_assert!(unmapped.is_ok());
        }
    }
}

#[cfg(target_os = "macos")]
mod platform {
    use std::ffi::c_void;
    use std::io;
    use std::ptr::NonNull;

    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    /// A private anonymous mapping. Its pages become resident when they are written, and belong to it alone, so that a
    /// GPU can use them in place.
    pub struct Pages {
        mapping: NonNull<c_void>,
        len: usize,
    }

    // SAFETY: it owns the mapping, like a boxed slice.
    unsafe impl Send for Pages {}
    // SAFETY: as above.
    unsafe impl Sync for Pages {}

    impl Pages {
        pub fn new(len: usize, _: super::PageSize) -> io::Result<Pages> {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
            let mapping =
                unsafe { mmap_anonymous(std::ptr::null_mut(), len.max(1), access, MapFlags::PRIVATE)? };
            Ok(Pages { mapping: NonNull::new(mapping).ok_or(io::ErrorKind::OutOfMemory)?, len })
        }

        pub fn populate(&self, _: std::ops::Range<usize>) {}

        /// Empty: the system drops no pages at once that a GPU may have wired.
        pub fn whole_pages(&self, range: std::ops::Range<usize>) -> std::ops::Range<usize> {
            range.start..range.start
        }

        /// # Safety
        /// None, because it does nothing.
        pub unsafe fn give_back(&self, _: std::ops::Range<usize>) -> Option<usize> {
            None
        }

        pub fn first(&self) -> *mut u8 {
            self.mapping.as_ptr().cast()
        }

        pub fn bytes(&self) -> &[u8] {
            // SAFETY: the mapping is readable, initialised by the kernel, and lives as long as `self`.
            unsafe { std::slice::from_raw_parts(self.first(), self.len) }
        }

        pub fn bytes_mut(&mut self) -> &mut [u8] {
            // SAFETY: as above, and borrowed exclusively.
            unsafe { std::slice::from_raw_parts_mut(self.first(), self.len) }
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: it owns the mapping, and nothing borrows from it any more.
            let unmapped = unsafe { munmap(self.mapping.as_ptr(), self.len.max(1)) };
            debug_assert!(unmapped.is_ok());
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod platform {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::io;
    use std::ptr::NonNull;

    /// The alignment that direct I/O requires.
    const PAGE: usize = 4096;

    /// Memory from the global allocator.
    pub struct Pages {
        first: NonNull<u8>,
        layout: Layout,
        len: usize,
    }

    // SAFETY: it owns the memory, like a boxed slice.
    unsafe impl Send for Pages {}
    // SAFETY: as above.
    unsafe impl Sync for Pages {}

    impl Pages {
        pub fn new(len: usize, _: super::PageSize) -> io::Result<Pages> {
            let layout = Layout::from_size_align(len.max(1), PAGE).map_err(|_| io::ErrorKind::OutOfMemory)?;
            // SAFETY: the layout has a nonzero size.
            let first = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(io::ErrorKind::OutOfMemory)?;
            Ok(Pages { first, layout, len })
        }

        pub fn populate(&self, _: std::ops::Range<usize>) {}

        /// Empty: the allocator takes nothing back in parts.
        pub fn whole_pages(&self, range: std::ops::Range<usize>) -> std::ops::Range<usize> {
            range.start..range.start
        }

        /// # Safety
        /// None, because it does nothing.
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
    fn pages_given_back_are_zero_and_their_neighbours_keep_their_contents() {
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
    fn more_than_the_address_space_is_an_error() {
        assert!(Region::new(usize::MAX).is_err());
        assert!(Region::new(1 << 60).is_err());
    }
}
