//! What happens when a GPU fails. This is a separate test program, because a failure in the emulator affects the whole
//! process. A real GPU does not fail on request.

#[path = "../common/mod.rs"]
mod common;

mod driver;

forebay_device_tests::device_suite!(crate::common::Gpu: faults, tier_faults);
