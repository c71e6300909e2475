//! Forebay's engine: runs Mixture-of-Experts language models that are larger than memory.
//!
//! An [`Engine`] is a loaded model; a [`Session`] is one conversation with it.
//!
//! ```no_run
//! use forebay_engine::{Engine, Event, Options, Request};
//!
//! let engine = Engine::open("model.gguf".as_ref(), &Options::default())?;
//! let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
//! let mut session = engine.session();
//! let answer = session.generate(&Request::new(&engine, prompt)?, &mut |event| {
//!     if let Event::Text(text) = event {
//!         print!("{text}");
//!     }
//! })?;
//! # Ok::<(), forebay_engine::Error>(())
//! ```

pub mod backend;
pub mod blocks;
pub mod bound;
pub mod chat;
mod client;
mod crowd;
mod engine;
mod error;
mod files;
mod fingerprint;
pub mod format;
mod generate;
mod grammar;
mod heat;
mod ledger;
mod logits;
pub mod memory;
pub mod models;
pub mod plan;
pub mod predict;
mod preference;
mod prefix;
mod rehearsal;
pub mod sampler;
mod session;
pub mod stop;
pub mod store;
pub mod synth;
pub mod tokenizer;

pub use backend::Precision;
pub use blocks::Cancel;
pub use client::{Client, Tenant};
pub use crowd::{Crowd, CrowdOptions, Listener};
pub use engine::{Engine, Options, Prospect};
pub use error::{Bytes, Error, Result};
pub use files::{make_private, private_options};
pub use fingerprint::Fnv;
pub use generate::{Answer, Event, FinishReason, Request, Stats, Writing};
pub use grammar::Grammar;
pub use ledger::{Hold, MemoryEntry, MemoryTier, Purpose};
pub use logits::{Best, Logits};
pub use prefix::{PrefixMeters, PrefixOptions};
pub use rehearsal::ComputeTime;
pub use sampler::Scored;
pub use session::{AllLogits, Batch, Extended, Routed, RoutedWatch, Sequence, Session, State, Step, Turn};

/// A token of a model's vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct TokenId(pub u32);

/// A layer of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerIdx(pub usize);

/// A routed expert of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertIdx(pub u32);

/// The instruction sets of this processor that the kernels use, best first.
pub fn instruction_sets() -> Vec<&'static str> {
    forebay_kernels::Isa::available().into_iter().map(forebay_kernels::Isa::name).collect()
}
