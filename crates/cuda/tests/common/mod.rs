//! The GPU as a device for the suite in crates/device-tests, and helpers for CUDA's own tests.

// Each test program uses only a part of this module.
#![allow(dead_code)]

use std::sync::Arc;

use forebay_cuda::Cuda;
use forebay_device_tests::{CountingDevice, Fault, FaultyDevice, TestDevice, Use};
use forebay_engine::Result;
use forebay_engine::internals::experts::Device;
use forebay_testing::{Need, skipped};

pub mod emulator;

use emulator::Emulator;

/// The first GPU.
pub struct Gpu;

impl TestDevice for Gpu {
    type Device = Cuda;

    // Queries and weights are split into two f16 each, which is as precise as f32; keys and values are rounded to one
    // f16.
    const ATTENTION: f64 = 5e-4;
    // Both compute in f32, with sums in another order.
    const RECURRENCE: f64 = 1e-4;

    fn is_there() -> bool {
        forebay_cuda::find().map_err(|why| skipped(Need::Gpu, why)).is_ok()
    }

    fn is_emulated() -> bool {
        emulator::is_emulated()
    }

    fn open(memory: Option<u64>) -> Result<Cuda> {
        Cuda::open(0, memory)
    }
}

impl CountingDevice for Gpu {
    fn used(gpu: &Cuda) -> Vec<(Use, u64)> {
        let purpose = |what| match what {
            "dense weights" => Use::Dense,
            "experts" => Use::Experts,
            "buffers" | "scratch" | "batch parameters" => Use::Scratch,
            other => Use::Other(other),
        };
        gpu.used().into_iter().map(|(what, bytes)| (purpose(what), bytes)).collect()
    }
}

impl FaultyDevice for Gpu {
    type Faults = Emulator;

    fn faults() -> Option<Emulator> {
        emulator::emulator()
    }

    fn words(fault: Fault) -> &'static [&'static str] {
        match fault {
            Fault::Allocation => &["out of memory"],
            Fault::Copy => &["the GPU cannot"],
            Fault::Launch => &["the GPU cannot compute", "too many resources"],
            Fault::Lost => &["the GPU cannot", "CUDA_ERROR_LAUNCH_FAILED"],
        }
    }
}

/// The first GPU. Without one the test is skipped.
pub fn gpu() -> Option<Arc<dyn Device>> {
    Gpu::is_there().then(|| Arc::new(Gpu::open(None).unwrap()) as Arc<dyn Device>)
}
