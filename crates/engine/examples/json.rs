//! An answer that satisfies a JSON schema.
//!
//!     cargo run --release -p forebay-engine --example json -- [MODEL]

use std::path::PathBuf;

use forebay_engine::{Engine, Grammar, Options, Request};
use serde_json::json;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).map_or_else(demo_model, PathBuf::from);
    let engine = Engine::open(&model, &Options::default())?;
    let schema = json!({
        "type": "object",
        "properties": {
            "animal": { "enum": ["cat", "dog", "bird"] },
            "legs": { "type": "integer", "minimum": 0, "maximum": 8 },
        },
        "required": ["animal", "legs"],
        "additionalProperties": false,
    });
    let prompt = engine.tokenizer().encode("An animal of the story: ", Default::default())?;
    let mut request = Request::new(&engine, prompt)?;
    request.grammar = Some(Grammar::json_schema(&engine, &schema)?);
    let answer = engine.session().generate(&request, &mut |_| ())?;
    let value: serde_json::Value = serde_json::from_str(&answer.text)?;
    println!("{} has {} legs", value["animal"], value["legs"]);
    Ok(())
}

/// The small trained model in this repository.
fn demo_model() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf").into()
}
