//! The engine's tests through its public interface. They are one program, because each further program would be linked
//! with the whole engine.

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
mod executor;
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
mod modules;
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
