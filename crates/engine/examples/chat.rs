//! A chat in ten lines. `Chat` applies the model's chat template, keeps the conversation, and computes only what is new in each turn.
//!
//!     cargo run --release -p forebay-engine --example chat -- [MODEL]

use std::io::{Write, stdin, stdout};
use std::path::PathBuf;

use forebay_engine::{Chat, Engine, Options};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).map_or_else(demo_model, PathBuf::from);
    let engine = Engine::open(&model, &Options::new())?;
    let mut chat = Chat::new(&engine);
    for line in stdin().lines() {
        chat.say(line?, |text| {
            print!("{text}");
            let _ = stdout().flush();
        })?;
        println!();
    }
    Ok(())
}

/// The small trained model of this repository.
fn demo_model() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf").into()
}
