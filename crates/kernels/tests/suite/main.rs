//! The kernels' tests through their public surface. One program, since every program more is linked with all of it.

#[path = "../common/mod.rs"]
mod common;

mod instruction_sets;
mod planes;
mod quants;
mod specification;
