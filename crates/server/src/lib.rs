//! Forebay's server: from a request in the format of OpenAI or Anthropic to its answer.
//!
//! A [`Server`] answers the requests of `forebay serve`. It accepts connections of its own ([`Server::listen`]), or answers requests
//! that another program has received ([`Server::handle`]). [`openai::Answers`] answers a body of OpenAI's API without HTTP.
//!
//! # Serving
//!
//! ```
//! use std::time::Duration;
//!
//! use forebay_engine::{Engine, Options, Prompter};
//! use forebay_server::{Server, ServerOptions};
//! use tokio::net::TcpListener;
//!
//! # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
//! # async fn ctrl_c() {}
//! let engine = Engine::open(model, &Options::new())?;
//! let server = Server::new("tales", ServerOptions::new())?;
//! forebay_server::runtime()?.block_on(async {
//!     let mut connections = server.listen(TcpListener::bind("127.0.0.1:0").await?);
//!     let mut running = server.start(Prompter::new(&engine), None)?;
//!     tokio::select! {
//!         () = ctrl_c() => {}
//!         () = running.ended() => eprintln!("the computation has ended"),
//!     }
//!     server.drain();
//!     if !connections.close(Duration::from_secs(60)).await {
//!         server.abandon();
//!     }
//!     Ok::<(), Box<dyn std::error::Error>>(())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The path of a request
//!
//! `router` admits it, [`openai`] or `anthropic` parses it, `prepare` converts it to a question for the engine, and `turn` sends it to
//! the engine's driver, which computes all questions together and streams the events back.

mod anthropic;
mod app;
mod body;
pub mod clients;
mod dates;
mod error;
mod guard;
mod info;
mod listen;
mod live;
mod memory;
mod meters;
pub mod openai;
mod openapi;
mod options;
mod page;
mod prepare;
mod router;
mod server;
mod sse;
mod turn;

pub use axum::body::{Body, Bytes};
pub use axum::http;

pub use self::dates::rfc3339;
pub use self::error::{ApiError, Retry};
pub use self::guard::Caller;
pub use self::listen::Connections;
pub use self::options::{ServerOptions, Words, model_name};
pub use self::server::{Running, Server, runtime};
