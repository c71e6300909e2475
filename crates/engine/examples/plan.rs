//! How a model's memory is divided under several budgets. No weight is read.
//!
//!     cargo run --release -p forebay-engine --example plan -- [MODEL]

use std::path::PathBuf;

use forebay_engine::{Bytes, Options, Prospect};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).map_or_else(demo_model, PathBuf::from);
    let options = Options::default();
    let prospect = Prospect::new(&model, &options)?;
    let (least, all) = (prospect.least_memory(&options)?, prospect.memory_for_all(&options)?);
    println!("smallest budget that works: {}", Bytes(least));
    println!("budget that keeps all experts in memory: {}", Bytes(all));
    for memory in [least, (least + all) / 2, all] {
        let plan = prospect.plan_for(&options, memory)?;
        println!(
            "with {}: {} dense weights, {} KV cache, {} of {} experts in memory, prompts in chunks of {} tokens",
            Bytes(memory),
            Bytes(plan.dense),
            Bytes(plan.kv),
            plan.slots.iter().sum::<usize>(),
            plan.expert_count,
            plan.chunk
        );
    }
    Ok(())
}

/// The small trained model in this repository.
fn demo_model() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf").into()
}
