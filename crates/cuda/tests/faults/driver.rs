//! Failures that only CUDA's driver and compiler have.

use std::sync::Arc;

use forebay_cuda::Cuda;
use forebay_device_tests::faults::answer;
use forebay_device_tests::models::options;
use forebay_engine::{Options, Precision};

use crate::common::emulator::emulator;

fn gpu() -> Arc<Cuda> {
    Arc::new(Cuda::open(0, None).unwrap())
}

fn on(device: &Arc<Cuda>) -> Options {
    options(Precision::Fast).device(Some(device.clone()))
}

#[test]
fn pinned_memory_that_is_not_there_is_an_error() {
    let Some(emulator) = emulator() else { return };
    emulator.fail_call("pinned", 1);
    let error = answer(&on(&gpu())).unwrap_err().to_string();
    assert!(error.contains("pin memory") && error.contains("Options::device = None"), "{error}");
    answer(&on(&gpu())).unwrap();
}

#[test]
fn kernels_that_do_not_compile_are_named() {
    let Some(emulator) = emulator() else { return };
    let device = gpu();
    answer(&on(&device)).unwrap();
    // The cached module is rejected, so the source is compiled.
    emulator.fail_call("module", 3);
    emulator.fail_call("compile", 1);
    let error = answer(&on(&device)).unwrap_err().to_string();
    let named = |error: &str| {
        let (_, rest) = error.split_once("kernels (")?;
        let (name, rest) = rest.split_once(") cannot be compiled for sm_90")?;
        Some(rest.contains(&format!("{name}.cu(1): error")) && rest.contains("Options::device = None"))
    };
    assert_eq!(named(&error), Some(true), "{error}");
    answer(&on(&device)).unwrap();
}
