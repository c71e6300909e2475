//! What several integration tests share.

pub mod gguf_builder;
pub mod tiny_model;
