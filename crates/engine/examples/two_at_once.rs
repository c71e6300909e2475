//! Two conversations at once, each asked from its own thread. One of them is cancelled.
//!
//!     cargo run --release -p forebay-engine --example two_at_once -- [MODEL]

use std::path::PathBuf;
use std::thread;

use forebay_engine::{ChatRequest, Driver, DriverOptions, Engine, Options, ReplyEvent};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).map_or_else(demo_model, PathBuf::from);
    let engine = Engine::open(&model, &Options::default())?;
    let driver = Driver::start(&engine, DriverOptions::new(2))?;

    let whole = driver.chat(ChatRequest::user("Tell me a story about a cat.").max_tokens(60))?;
    let impatient = driver.clone();
    let left = thread::spawn(move || -> forebay_engine::Result<String> {
        let mut begun = String::new();
        for event in impatient.chat(ChatRequest::user("Tell me a story about the sea."))? {
            if let ReplyEvent::Content { text, .. } = event? {
                begun.push_str(&text);
            }
            if begun.len() > 40 {
                // Leaving the loop drops the stream, which cancels the answer.
                break;
            }
        }
        Ok(begun)
    });
    println!("{}\n", whole.whole()?.content);
    println!("{} … [cancelled]", left.join().expect("it does not panic")?);

    // No more requests follow, so the driver's thread ends.
    driver.close();
    driver.join();
    Ok(())
}

/// The small trained model in this repository.
fn demo_model() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf").into()
}
