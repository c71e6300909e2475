//! CPU arithmetic on slices. This crate knows no model, no file and no thread pool policy.

mod dtype;

pub use dtype::DType;
