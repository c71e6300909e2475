//! Helpers for the integration tests.

pub mod dialects;
pub mod engines;
pub mod folder_builder;
pub mod gguf_builder;
pub mod memory;
pub mod models;
pub mod mutate;
pub mod schema;
pub mod served;
pub mod slots;
pub mod templates;
pub mod tiny_model;
