//! What the tests on a GPU share.

// Each test program uses a part of this.
#![allow(dead_code)]

use std::sync::Arc;

use forebay_cuda::Cuda;
use forebay_engine::experts::Device;
use forebay_testing::{Need, skipped};

pub mod emulator;
#[path = "../../../engine/tests/common/gguf_builder.rs"]
pub mod gguf_builder;
#[path = "../../../engine/tests/common/models.rs"]
pub mod models;
pub mod tiers;
#[path = "../../../engine/tests/common/tiny_model.rs"]
pub mod tiny_model;

/// The first GPU; without one a test is skipped, and says so.
pub fn gpu() -> Option<Arc<dyn Device>> {
    match forebay_cuda::find() {
        Ok(_) => Some(Arc::new(Cuda::open(0, None).unwrap())),
        Err(why) => {
            skipped(Need::Gpu, why);
            None
        }
    }
}

/// So many, or fewer on the emulator, which takes thousands of times as long.
pub fn at_most(all: usize, emulated: usize) -> usize {
    if emulator::is_emulated() { emulated } else { all }
}
