//! What a program meets when a GPU fails it. A test program of its own, because what fails in the emulator fails for the whole
//! process; only the emulator fails when asked, and it does so for one test at a time.

#[path = "../common/mod.rs"]
mod common;

mod driver;

forebay_device_tests::device_suite!(crate::common::Gpu: faults, tier_faults);
