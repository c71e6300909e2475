//! The GPU as a device for the suite in crates/device-tests, in the variants of its kernels.

// Each test program uses only a part of this module.
#![allow(dead_code)]

use forebay_device_tests::{CountingDevice, TestDevice, Use};
use forebay_engine::Result;
use forebay_gpu::{Counts, PortableGpu, Variants, find};
use forebay_testing::{Need, skipped};

/// What a GPU is given to do for some work.
pub fn counted(gpu: &PortableGpu, work: impl FnOnce()) -> Counts {
    let before = gpu.counts();
    work();
    let after = gpu.counts();
    Counts {
        dispatches: after.dispatches - before.dispatches,
        submits: after.submits - before.submits,
        waits: after.waits - before.waits,
        uploaded: after.uploaded - before.uploaded,
    }
}

macro_rules! variants {
    ($($(#[$doc:meta])* $name:ident: $variants:expr;)+) => {
        $(
            $(#[$doc])*
            pub struct $name;

            impl TestDevice for $name {
                type Device = PortableGpu;

                // Keys and values are rounded to f16.
                const ATTENTION: f64 = 5e-4;
                // Both compute in f32, with sums in another order.
                const RECURRENCE: f64 = 1e-4;

                fn is_there() -> bool {
                    find().map_err(|why| skipped(Need::PortableGpu, why)).is_ok()
                }

                fn is_emulated() -> bool {
                    find().is_ok_and(|found| found[0].kind() == forebay_gpu::Kind::Software)
                }

                fn open(memory: Option<u64>) -> Result<PortableGpu> {
                    PortableGpu::open(&find()?[0], memory, $variants)
                }
            }
        )+
    };
}

variants! {
    /// The best GPU of the machine, with all that it has.
    Best: Variants::ALL;
    /// The same GPU without anything that a GPU may lack.
    Plain: Variants::PLAIN;
    /// The same GPU as a card with memory of its own.
    Card: Variants { sharing: false, ..Variants::ALL };
}

impl CountingDevice for Card {
    fn used(gpu: &PortableGpu) -> Vec<(Use, u64)> {
        let purpose = |what| match what {
            "dense weights" => Use::Dense,
            "experts" => Use::Experts,
            "buffers" | "scratch" | "batch parameters" | "expert table" => Use::Scratch,
            other => Use::Other(other),
        };
        gpu.used().into_iter().map(|(what, bytes)| (purpose(what), bytes)).collect()
    }
}
