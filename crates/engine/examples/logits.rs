//! The most likely next tokens of a text, with their probabilities.
//!
//!     cargo run --release -p forebay-engine --example logits -- [MODEL] [TEXT]

use std::path::PathBuf;

use forebay_engine::{Engine, Options, TokenId};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().map_or_else(demo_model, PathBuf::from);
    let text = arguments.next().unwrap_or_else(|| "The cat sat on the".into());

    let engine = Engine::open(&model, &Options::default())?;
    let mut session = engine.session();
    session.extend(&engine.tokenizer().encode(&text, Default::default())?)?;
    let logits = session.logits();
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f32 = logits.iter().map(|logit| (logit - most).exp()).sum();
    let mut ranked: Vec<usize> = (0..logits.len()).collect();
    ranked.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    for token in ranked.into_iter().take(10) {
        let probability = (logits[token] - most).exp() / total;
        println!("{:6.2} %  {:?}", 100.0 * probability, engine.tokenizer().token_text(TokenId(token as u32)));
    }
    Ok(())
}

/// The small trained model in this repository.
fn demo_model() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf").into()
}
