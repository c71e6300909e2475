//! A chat with the driver, whose answers come in typed pieces: reasoning, text and tool calls. An empty line ends it.
//!
//!     cargo run --release -p forebay-engine --example pieces -- [MODEL]

use std::io::{BufRead, Write};
use std::path::PathBuf;

use forebay_engine::chat::Message;
use forebay_engine::conversation::Draft;
use forebay_engine::{ChatRequest, Driver, DriverOptions, Engine, Options, ReplyEvent};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).map_or_else(demo_model, PathBuf::from);
    let engine = Engine::open(&model, &Options::default())?;
    let mut options = DriverOptions::new(1);
    // The prefix cache: the next turn begins like this one, so only its new tokens are computed.
    options.crowd.prefixes = Some(forebay_engine::PrefixOptions::new(&engine, None));
    let driver = Driver::start(&engine, options)?;

    let mut messages = Vec::new();
    eprint!("> ");
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line.is_empty() {
            break;
        }
        messages.push(Message::new("user", line));
        let mut draft = Draft::default();
        for event in driver.chat(ChatRequest::new(messages.clone()).max_tokens(200))? {
            let event = event?;
            match &event {
                ReplyEvent::Start(_) | ReplyEvent::Progress { .. } => {}
                ReplyEvent::Reasoning(text) => eprint!("{text}"),
                ReplyEvent::Content { text, .. } => print!("{text}"),
                ReplyEvent::Call { name, .. } => print!("\n[calls {name}] "),
                ReplyEvent::Arguments(json) => print!("{json}"),
                ReplyEvent::End(answer) => {
                    println!();
                    let stats = &answer.stats;
                    eprintln!(
                        "{} tokens, {} of the prompt from the cache, {:.1} per second\n> ",
                        stats.generated_tokens,
                        stats.reused_tokens,
                        stats.steps_per_second()
                    );
                }
            }
            std::io::stdout().flush()?;
            if let Some(reply) = draft.take(event) {
                messages.push(reply.message());
            }
        }
    }
    Ok(())
}

/// The small trained model in this repository.
fn demo_model() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf").into()
}
