//! The backend's tests, on a GPU where they need one. One program, since every program more is linked with all of it.

#[path = "../common/mod.rs"]
mod common;

mod kernels;
mod types;

forebay_device_tests::device_suite!(crate::common::Gpu: golden, conversations, batches, memory, tiers);
