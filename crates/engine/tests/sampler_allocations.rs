//! Choosing a token allocates nothing once the buffers have grown. A test program of its own, because it puts
//! an allocator that counts in the place of the usual one.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use forebay_engine::sampler::{Sampler, SamplingParams};

thread_local! {
    /// By thread, so that the test runner's own allocations do not count.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory that it manages.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the promises that `alloc` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `System`, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_token_allocates_nothing_after_the_first_ones() {
    const VOCAB: usize = 5000;
    let params = SamplingParams {
        temperature: 3.0,
        top_k: 0,
        repeat_penalty: 1.1,
        frequency_penalty: 0.1,
        seed: Some(1),
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new(params, VOCAB).unwrap();
    let logits: Vec<f32> = (0..VOCAB).map(|i| (i * 7919 % VOCAB) as f32 / 500.0).collect();
    let mut generate = |tokens| {
        let before = ALLOCATIONS.get();
        for _ in 0..tokens {
            let token = sampler.sample(&logits).unwrap();
            sampler.accept(token);
        }
        ALLOCATIONS.get() - before
    };
    generate(1);
    assert_eq!(generate(2000), 0);
}
