//! An answer in async code: the driver sends events to a Tokio channel. The engine itself needs no async runtime.
//!
//!     cargo run --release -p forebay-engine --example async_chat -- [MODEL]

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use forebay_engine::{ChatRequest, Driver, DriverOptions, Engine, Options, ReplyEvent};
use tokio::sync::mpsc::unbounded_channel;
use tokio::task::spawn_blocking;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).map_or_else(demo_model, PathBuf::from);
    let engine = Engine::open(&model, &Options::default())?;
    let driver = Driver::start(&engine, DriverOptions::new(8))?;

    // Rendering and encoding a long conversation takes a while, so they run on a thread that may block.
    let request = ChatRequest::user("Tell me a story about a boat.").max_tokens(60);
    let prompter = driver.prompter().clone();
    let question = spawn_blocking(move || prompter.chat(request)).await??;

    let (sender, mut events) = unbounded_channel();
    // Dropping the ticket cancels the answer. So dropping this future cancels it, too.
    let _ticket = driver.ask_telling(question, move |event| drop(sender.send(event)))?;
    loop {
        match tokio::time::timeout(Duration::from_secs(60), events.recv()).await? {
            Some(Ok(ReplyEvent::Content { text, .. })) => print!("{text}"),
            Some(Ok(ReplyEvent::End(answer))) => {
                println!("\n[{}]", answer.finish_reason.name());
                return Ok(());
            }
            Some(event) => drop(event?),
            None => return Err("the driver ended without an answer".into()),
        }
        std::io::stdout().flush()?;
    }
}

/// The small trained model in this repository.
fn demo_model() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf").into()
}
