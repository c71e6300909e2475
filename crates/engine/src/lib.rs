//! Runs Mixture-of-Experts language models, including models that are larger than memory.
//!
//! A Mixture-of-Experts model has many experts in each layer, and each token uses a few of them. This crate keeps the
//! weights that every token uses in memory. The rest of the memory caches experts; the crate reads all other experts
//! from the drive when a token needs them. Models are GGUF files, or folders with safetensors files.
//!
//! An [`Engine`] is a loaded model. A [`Chat`] is one conversation in messages, and a [`Session`] is one in tokens. A
//! [`Driver`] answers many conversations at once, on its own thread.
//!
//! # Adding the crate
//!
//! The crate is not on crates.io. Point to a checkout of the repository:
//!
//! ```toml
//! [dependencies]
//! forebay-engine = { path = "forebay/crates/engine" }
//!
//! # Without optimisation the arithmetic is many times slower.
//! [profile.dev.package."*"]
//! opt-level = 2
//! ```
//!
//! The examples on these pages use the small model in the repository's folder `models`.
//!
//! # One answer
//!
//! ```
//! use std::path::Path;
//!
//! use forebay_engine::{Engine, Event, Options, Request};
//!
//! let model = Path::new("model.gguf");
//! # let model = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
//! let engine = Engine::open(model, &Options::new())?;
//! let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
//! let request = Request::new(&engine, prompt)?.max_tokens(8);
//! let mut session = engine.session();
//! let answer = session.generate(&request, &mut |event| {
//!     if let Event::Text(text) = event {
//!         print!("{text}");
//!     }
//! })?;
//! assert_eq!(answer.tokens.len(), 8);
//! # Ok::<(), forebay_engine::Error>(())
//! ```
//!
//! A [`Request`] describes an answer: the prompt, how tokens are sampled ([`SamplingParams`]), where the answer ends,
//! and what form it must have ([`Grammar`]). A session keeps the KV cache of its tokens. If the next prompt begins with
//! the same tokens, [`Session::extend`] and [`Session::generate`] compute only the rest. [`Session::fork`] makes a
//! second session that shares the past, and [`Session::save`] writes a session to a file.
//!
//! # A chat
//!
//! A [`Chat`] is a conversation with one user. It renders the messages with the model's chat template, keeps them, and
//! computes only what is new in each turn.
//!
//! ```
//! use std::io::stdin;
//!
//! use forebay_engine::{Chat, Engine, Options};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
//! let engine = Engine::open(model, &Options::new())?;
//! let mut chat = Chat::new(&engine);
//! for line in stdin().lines() {
//!     chat.say(line?, |text| print!("{text}"))?;
//!     println!();
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Many conversations
//!
//! A [`Driver`] answers many conversations at once. A [`ChatRequest`] has messages instead of tokens. The driver renders
//! them with the model's chat template. It returns the answer in typed pieces: reasoning, text, and tool calls.
//!
//! ```
//! use forebay_engine::chat::Message;
//! use forebay_engine::{ChatRequest, Driver, DriverOptions, Engine, Options, ReplyEvent};
//!
//! # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
//! let engine = Engine::open(model, &Options::new())?;
//! let driver = Driver::start(&engine, DriverOptions::new(4))?; // up to four answers at once
//!
//! // As it comes:
//! let mut messages = vec![Message::new("user", "Tell me a story.")];
//! for event in driver.chat(ChatRequest::new(messages.clone()).max_tokens(8))? {
//!     if let ReplyEvent::Content { text, .. } = event? {
//!         print!("{text}");
//!     }
//! }
//!
//! // As a whole:
//! let reply = driver.chat(ChatRequest::new(messages.clone()).max_tokens(8))?.whole()?;
//! messages.push(reply.message());
//! messages.push(Message::new("user", "Go on."));
//! # assert_eq!(messages.len(), 3);
//! # Ok::<(), forebay_engine::Error>(())
//! ```
//!
//! Clones of a driver are handles to the same thread, and any thread may use one. Dropping a [`ReplyStream`] cancels
//! its answer. Programs with an async runtime use [`Driver::ask_telling`], which calls a function with each event. The
//! crate itself needs no runtime; `examples/async_chat.rs` shows the driver with Tokio.
//!
//! # Where memory goes
//!
//! The engine stays within a memory budget, which [`Options::memory`] sets. By default the budget is the available
//! memory of the machine less a margin. A [`Plan`] divides the budget before any weight is read:
//!
//! - the dense weights, which every token uses,
//! - the KV cache of one conversation, as long as [`Options::context`] says,
//! - buffers for the computation, and the process itself,
//! - slots for experts, which get the rest.
//!
//! If there is a slot for every expert, the engine reads all experts when it loads the model. Otherwise it streams
//! them: it reads an expert from the drive when a token needs it, and evicts another one ([`PolicyKind`]). On the CPU,
//! the budget changes the speed of an answer and never its text.
//!
//! ```
//! use forebay_engine::{Bytes, Machine, Options, Prospect};
//!
//! # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
//! // A prospect is a model that is described and planned, but not loaded.
//! let options = Options::new().context(1024).machine(Machine::now());
//! let prospect = Prospect::new(model, &options)?;
//! let least = prospect.least_memory(&options)?;
//! let plan = prospect.plan_for(&options, least)?;
//! let slots: usize = plan.slots.iter().sum();
//! println!("with {} there are {slots} slots for {} experts", Bytes(least), plan.expert_count);
//! assert!(plan.streams());
//! # Ok::<(), forebay_engine::Error>(())
//! ```
//!
//! While the model runs, more conversations, longer ones, grammars and requests need memory. The engine takes it from
//! expert slots and returns it afterwards. [`Engine::memory`] lists the current use of memory, and [`Engine::meters`]
//! counts how often an expert was in memory. If memory does not suffice, the error is [`Error::Budget`]: it says what
//! is needed, what is available, and what to change.
//!
//! # What the crate leaves to the caller
//!
//! The crate prints nothing, installs no signal handler, and logs with `tracing`. It reads one environment variable,
//! `FOREBAY_ISA`, which selects one of the [instruction sets](instruction_sets) for tests. An engine computes one batch
//! at a time, with [`Options::threads`] threads. A [`Cancel`] stops a computation from another thread, at the next
//! layer.
//!
//! The CPU computes, unless [`Options::device`] names a [`Device`]. The crate `forebay-cuda` has one for NVIDIA GPUs.
//!
//! # Features
//!
//! | feature, on by default | brings | without it |
//! |---|---|---|
//! | `grammar` | answers that must be JSON or text of a Lark grammar, with `llguidance` | making a [`Grammar`] is an error |
//!
//! # Modules
//!
//! The most used types are at the root of the crate. [`chat`] has chat templates and dialects, [`conversation`] has
//! requests and replies, [`driver`] has the driver, [`plan`] divides memory, and [`tokenizer`] converts text to tokens.
//!
//! [`internals`] has what Forebay's own crates use in addition, such as the interfaces that a device implements. It may
//! change in any version, and semantic versioning does not cover it. Other programs should not need it.

mod backend;
mod blocks;
mod chain;
pub mod chat;
pub mod conversation;
pub mod driver;
mod engine;
mod error;
mod experts;
mod files;
mod forecast;
mod format;
mod generate;
mod hash;
pub mod internals;
mod memory;
mod models;
pub mod plan;
mod session;
mod stage;
mod synth;
pub mod tokenizer;

pub use backend::{Best, Logits, Precision};
pub use blocks::{Cancel, PromptMeter, PromptProgress};
pub use chain::{Lost, Transport};
pub use conversation::{Chat, ChatRequest, Prompter, Question, Reply, ReplyEvent};
pub use driver::crowd::{Crowd, CrowdOptions, Listener};
pub use driver::prefix::{PrefixMeters, PrefixOptions};
pub use driver::{Driver, DriverOptions, ReplyStream};
pub use engine::{Engine, Options, Prospect};
pub use error::{Bytes, Error, Result};
pub use experts::policy::PolicyKind;
pub use experts::{Device, IoMethod, Meters};
pub use format::ModelFile;
pub use generate::client::{Client, Tenant};
pub use generate::grammar::Grammar;
pub use generate::sampler::{SamplingOverrides, SamplingParams, Scored};
pub use generate::{Answer, Event, FinishReason, Request, Stats};
pub use memory::{Hold, Machine, MemoryEntry, MemoryTier, Purpose};
pub use models::Span;
pub use plan::{ExpertMemory, Plan};
pub use session::{AllLogits, Extended, Routed, RoutedWatch, Session, Step, Turn};
pub use stage::{Stage, StageHost, StageSession, StageTurn};

/// A token of a model's vocabulary.
///
/// # Examples
/// ```
/// use forebay_engine::TokenId;
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let tokens = engine.tokenizer().encode("Once upon a time", Default::default())?;
/// let numbers: Vec<u32> = tokens.iter().map(|token| token.0).collect();
/// assert_eq!(engine.tokenizer().token_text(TokenId(numbers[0])), "Once");
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct TokenId(pub u32);

/// A layer of a model.
///
/// [`ExpertIdx`] has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerIdx(pub usize);

/// A routed expert of a layer.
///
/// # Examples
/// ```
/// use forebay_engine::{ExpertIdx, LayerIdx};
///
/// // Two types, so that a layer cannot be taken for an expert.
/// let expert = (LayerIdx(3), ExpertIdx(5));
/// assert!(expert < (LayerIdx(3), ExpertIdx(6)));
/// assert!(expert < (LayerIdx(4), ExpertIdx(0)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertIdx(pub u32);

/// The instruction sets of this CPU that the kernels support, best first.
///
/// # Examples
/// ```
/// let sets = forebay_engine::instruction_sets();
/// assert_eq!(sets.last(), Some(&"scalar"), "every processor has it");
/// ```
pub fn instruction_sets() -> Vec<&'static str> {
    forebay_kernels::Isa::available().into_iter().map(forebay_kernels::Isa::name).collect()
}
