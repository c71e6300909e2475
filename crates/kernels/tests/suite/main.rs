//! The kernels' tests through their public interface. They are one program, because each further program would be
//! linked with all kernels.

#[path = "../common/mod.rs"]
mod common;

mod instruction_sets;
mod planes;
mod quants;
mod specification;
