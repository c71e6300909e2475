//! One answer: continues a prompt and prints the text while it is generated.
//!
//!     cargo run --release -p forebay-engine --example answer -- [MODEL] [PROMPT]

use std::io::Write;
use std::path::PathBuf;

use forebay_engine::{Engine, Event, Options, Request};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().map_or_else(demo_model, PathBuf::from);
    let prompt = arguments.next().unwrap_or_else(|| "Once upon a time".into());

    let engine = Engine::open(&model, &Options::default())?;
    let tokens = engine.tokenizer().encode(&prompt, Default::default())?;
    let request = Request::new(&engine, tokens)?.max_tokens(64);
    print!("{prompt}");
    let answer = engine.session().generate(&request, &mut |event| {
        if let Event::Text(text) = event {
            print!("{text}");
            let _ = std::io::stdout().flush();
        }
    })?;
    println!();
    eprintln!("{} tokens, {:.1} per second", answer.tokens.len(), answer.stats.steps_per_second());
    Ok(())
}

/// The small trained model in this repository.
fn demo_model() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf").into()
}
