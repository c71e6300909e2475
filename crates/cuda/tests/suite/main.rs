//! The CUDA backend's tests. Some need a GPU or the emulator. They are one program, because each further program would
//! be linked with the whole backend.

#[path = "../common/mod.rs"]
mod common;

mod types;

forebay_device_tests::device_suite!(crate::common::Gpu: kernels, operations, mixtures, golden, conversations, batches, memory, tiers);
