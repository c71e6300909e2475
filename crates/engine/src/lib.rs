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
pub mod chat;
pub mod conversation;
pub mod driver;
mod engine;
mod error;
pub mod experts;
mod files;
pub mod forecast;
pub mod format;
pub mod generate;
mod hash;
pub mod memory;
pub mod models;
pub mod plan;
mod session;
pub mod synth;
pub mod tokenizer;

pub use backend::{Batch, Best, Logits, Precision, Sequence, SequenceState};
pub use blocks::Cancel;
pub use conversation::{ChatRequest, Prompter, Question, Reply, ReplyEvent};
pub use driver::crowd::{Crowd, CrowdOptions, Listener};
pub use driver::prefix::{PrefixMeters, PrefixOptions};
pub use driver::{Driver, DriverOptions, ReplyStream};
pub use engine::{Engine, Options, Prospect};
pub use error::{Bytes, Error, Result};
pub use files::{make_private, private_options};
pub use forecast::ComputeTime;
pub use generate::client::{Client, Tenant};
pub use generate::grammar::Grammar;
pub use generate::sampler::Scored;
pub use generate::{Answer, Event, FinishReason, Request, Stats, Writing};
pub use hash::Fnv;
pub use memory::{Hold, MemoryEntry, MemoryTier, Purpose};
pub use session::{AllLogits, Extended, Routed, RoutedWatch, Session, Step, Turn};

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
