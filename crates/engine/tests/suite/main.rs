//! The engine's tests through its public surface. One program, since every program more is linked with all of it.

#[path = "../common/mod.rs"]
mod common;

mod allocations;
mod bits;
mod budget;
mod callbacks;
mod chat_control;
mod chat_template;
mod chat_vectors;
mod crowd;
mod device_lost;
mod device_plan;
mod dialect;
mod dialect_formats;
mod dialect_grammar;
mod dialect_limit;
mod driver;
mod folder_errors;
mod folder_hostile;
mod folders;
mod generation;
mod gguf_errors;
mod gguf_hostile;
mod gguf_reader;
mod gguf_split;
mod golden;
mod grammar;
mod memory_conversations;
mod memory_crowd;
mod memory_grammars;
mod model_hostile;
mod prefixes;
mod refusals;
mod regressions;
mod sessions;
mod snapshots;
mod store;
mod streaming;
mod tokenizer_folder;
mod tokenizer_metadata;
mod tokenizer_pre;
mod tokenizer_vectors;
mod traffic;
mod types;
