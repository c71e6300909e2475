//! The backend's tests, on a GPU where they need one. One program, since every program more is linked with all of it.

#[path = "../common/mod.rs"]
mod common;

mod batches;
mod golden;
mod kernels;
mod tiers;
mod types;
