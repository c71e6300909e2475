//! A global allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The memory that some work on this thread used, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct MemoryUse {
    /// The most that was allocated at one time.
    pub peak: usize,
    /// What the result still holds.
    pub kept: usize,
    /// The largest single allocation.
    pub largest: usize,
    /// How many allocations there were.
    pub allocations: usize,
}

pub fn measure<T>(work: impl FnOnce() -> T) -> (T, MemoryUse) {
    let before = LIVE.get();
    PEAK.set(before);
    LARGEST.set(0);
    ALLOCATIONS.set(0);
    let result = work();
    let since = |bytes: isize| usize::try_from(bytes - before).unwrap_or(0);
    let used = MemoryUse {
        peak: since(PEAK.get()),
        kept: since(LIVE.get()),
        largest: LARGEST.get(),
        allocations: ALLOCATIONS.get(),
    };
    (result, used)
}

// Counted per thread, so that tests do not disturb each other. The measured work must stay on its thread.
thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// Wraps the system's allocator and counts what the current thread has allocated. It uses the default reallocation,
/// which allocates anew while the old memory is still in use, because that is the worst case.
struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn count(bytes: usize) {
    LIVE.set(LIVE.get() + bytes as isize);
    PEAK.set(PEAK.get().max(LIVE.get()));
    LARGEST.set(LARGEST.get().max(bytes));
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
}

// SAFETY: every call goes to the system's allocator unchanged; the counters neither allocate nor unwind.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    /// Overrides the default, which would write to all pages and so make them resident.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get() - layout.size() as isize);
        // SAFETY: the caller keeps the contract of `dealloc`, and the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}
