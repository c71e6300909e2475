//! An allocator that counts, in the place of the usual one, for the test programs that include this file.

// Each test binary compiles this file for itself and uses only some of it.
#![allow(dead_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The memory that some work on this thread took, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct MemoryUse {
    /// The most that was live at one time.
    pub peak: usize,
    /// What the result still holds.
    pub kept: usize,
    /// The largest single allocation.
    pub largest: usize,
}

pub fn measure<T>(work: impl FnOnce() -> T) -> (T, MemoryUse) {
    let before = LIVE.get();
    PEAK.set(before);
    LARGEST.set(0);
    let result = work();
    let since = |bytes: isize| usize::try_from(bytes - before).unwrap_or(0);
    (result, MemoryUse { peak: since(PEAK.get()), kept: since(LIVE.get()), largest: LARGEST.get() })
}

// By thread, so that tests do not disturb each other: the work must stay on the thread that measures it.
thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counting what the current thread has live. A reallocation is the default one: a new
/// allocation while the old one is still live, which is the worst case.
struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

// SAFETY: every call goes to the system's allocator unchanged; the counters neither allocate nor unwind.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.set(LIVE.get() + layout.size() as isize);
        PEAK.set(PEAK.get().max(LIVE.get()));
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get() - layout.size() as isize);
        // SAFETY: the caller keeps the contract of `dealloc`, and the pointer came from `System.alloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}
