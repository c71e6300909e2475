//! Damaged models never cause a panic of the engine, nor allocations much larger than their files.

use std::path::Path;

use forebay_engine::internals::format::ModelFile;
use forebay_engine::{Engine, Options, Precision, Result, TokenId};
use forebay_testing::golden;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::Value;

use crate::common::gguf_builder::{GgufBuilder, value_type};
use crate::common::memory::measure;
use crate::common::mutate::mutate;
use crate::common::tiny_model::tiny_model;

/// What a tiny model may allocate: its buffers have a row for each token of a chunk.
const MOST: usize = 64 << 20;

/// All work is on the thread whose allocations are measured.
fn options(precision: Precision) -> Options {
    Options::default().threads(1).precision(precision)
}

/// Opens a model and, if that succeeds, computes a few tokens.
fn run(path: &Path, precision: Precision) -> Result<()> {
    let engine = Engine::open(path, &options(precision))?;
    let _ = engine.template();
    let last = TokenId(engine.vocab_size() as u32 - 1);
    let prompt = [TokenId(0), last, TokenId(0)];
    let mut session = engine.session();
    session.extend(&prompt[..prompt.len().min(engine.context())])?;
    assert_eq!(session.logits().len(), engine.vocab_size());
    Ok(())
}

#[test]
fn damaged_headers_are_refused_or_run() {
    const MUTATIONS: usize = 3000;
    let sound = tiny_model(32).build();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.gguf");
    std::fs::write(&path, &sound).unwrap();
    run(&path, Precision::Fast).unwrap();
    let model = ModelFile::open(&path).unwrap();
    let data_start = model.tensors.iter().map(|t| t.offset).min().unwrap() as usize;

    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let (mut refused, mut ran) = (0, 0);
    for round in 0..MUTATIONS {
        let mut file = sound[..data_start].to_vec();
        for _ in 0..1 + rng.next_u32() % 2 {
            mutate(&mut file, &mut rng);
        }
        file.extend_from_slice(&sound[data_start..]);
        std::fs::write(&path, &file).unwrap();
        let precision = if round % 2 == 0 { Precision::Fast } else { Precision::Exact };
        let (result, memory) = measure(|| run(&path, precision));
        assert!(memory.peak <= MOST, "round {round}: {memory:?} for a file of {}", file.len());
        match result {
            Ok(()) => ran += 1,
            Err(error) => {
                refused += 1;
                let message = error.to_string();
                assert!(message.len() < 1000, "round {round}: {message}");
            }
        }
    }
    assert!(refused > MUTATIONS / 4 && ran > MUTATIONS / 20, "{refused} refused, {ran} ran");
}

/// Numbers that the format allows and no model has. Random damage rarely passes the format's own checks.
#[test]
fn extreme_settings_are_refused_or_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.gguf");
    let try_file = |file: &GgufBuilder, what: &str| {
        let file = file.build();
        std::fs::write(&path, &file).unwrap();
        let (result, memory) = measure(|| run(&path, Precision::Fast));
        assert!(memory.peak <= MOST, "{what}: {memory:?} for a file of {}", file.len());
        result
    };
    let mut refused = 0;
    for key in [
        "block_count",
        "context_length",
        "embedding_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
    ] {
        let key = format!("qwen3moe.{key}");
        let without = tiny_model(32).without(&key);
        for value in [1, 2, 3, 6, 1 << 15, (1 << 16) + 1, 1 << 30, (1 << 30) + 1, 1 << 31, u32::MAX] {
            let result = try_file(&without.clone().u32(&key, value), &format!("{key} = {value}"));
            refused += usize::from(result.is_err());
        }
        for value in [1 << 30, 1 << 32, 1 << 62, u64::MAX] {
            let file = without.clone().raw(&key, value_type::U64, u64::to_le_bytes(value));
            refused += usize::from(try_file(&file, &format!("{key} = {value}")).is_err());
        }
    }
    assert!(refused > 70, "only {refused} were refused");
    for key in ["attention.layer_norm_rms_epsilon", "rope.freq_base"] {
        let key = format!("qwen3moe.{key}");
        let without = tiny_model(32).without(&key);
        for value in [f32::MIN_POSITIVE, 1e-45, f32::MAX, f32::INFINITY, f32::NAN, -1.0, 0.0, -0.0] {
            let sound = value.is_finite() && value > 0.0;
            let result = try_file(&without.clone().f32(&key, value), &format!("{key} = {value}"));
            assert_eq!(result.is_ok(), sound, "{key} = {value}");
        }
    }
}

/// The same for sizes of linear attention, in the header of a model that has it.
#[test]
fn extreme_sizes_of_linear_attention_are_refused_or_run() {
    let sound = std::fs::read(golden("qwen35moe.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.gguf");
    let mut refused = 0;
    for key in ["conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size"] {
        let key = format!("qwen35moe.ssm.{key}");
        let place = sound.windows(key.len()).position(|window| window == key.as_bytes()).unwrap();
        // The key is followed by the type and the value, four bytes each.
        let value_at = place + key.len() + 4;
        for value in [0, 1, 2, 3, 6, 32, 1 << 15, 1 << 24, 1 << 30, (1 << 30) + 1, u32::MAX] {
            let mut file = sound.clone();
            file[value_at..value_at + 4].copy_from_slice(&u32::to_le_bytes(value));
            std::fs::write(&path, &file).unwrap();
            let (result, memory) = measure(|| run(&path, Precision::Fast));
            assert!(memory.peak <= MOST, "{key} = {value}: {memory:?}");
            refused += usize::from(result.is_err());
        }
    }
    // The model has two key heads.
    assert_eq!(refused, 54);
    std::fs::write(&path, &sound).unwrap();
    run(&path, Precision::Fast).unwrap();
}

/// The same for settings of the rotation, whose frequencies may become NaN.
#[test]
fn extreme_rotations_are_refused_or_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.gguf");
    let keys = ["factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_attn_factor", "yarn_log_multiplier"];
    for kind in ["linear", "yarn"] {
        for key in keys {
            let key = format!("qwen3moe.rope.scaling.{key}");
            for value in [f32::MIN_POSITIVE, 1e-45, f32::MAX, f32::INFINITY, f32::NAN, -1.0, 1.0] {
                for original in [1, 1 << 30] {
                    let file = tiny_model(32)
                        .str("qwen3moe.rope.scaling.type", kind)
                        .u32("qwen3moe.rope.scaling.original_context_length", original)
                        .f32(&key, value);
                    std::fs::write(&path, file.build()).unwrap();
                    let (result, memory) = measure(|| run(&path, Precision::Fast));
                    assert!(memory.peak <= MOST, "{kind}, {key} = {value}: {memory:?}");
                    let sound = value == 1.0 && (kind == "yarn" || key.ends_with(".factor"));
                    assert!(result.is_ok() || !sound, "{kind}, {key} = {value}: {:?}", result.err());
                }
            }
        }
    }
}

/// NaN weights cause NaN logits, and nothing worse.
#[test]
fn weights_of_any_bits_are_computed() {
    let sound = tiny_model(32).build();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.gguf");
    std::fs::write(&path, &sound).unwrap();
    let model = ModelFile::open(&path).unwrap();
    let data_start = model.tensors.iter().map(|t| t.offset).min().unwrap() as usize;
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for (what, word) in [("NaN", f32::NAN), ("infinity", f32::INFINITY), ("the largest", f32::MAX)] {
        for precision in [Precision::Fast, Precision::Exact] {
            for share in [1, 50] {
                let mut file = sound.clone();
                for weight in file[data_start..].chunks_exact_mut(4) {
                    if rng.next_u32().is_multiple_of(share) {
                        weight.copy_from_slice(&word.to_le_bytes());
                    }
                }
                std::fs::write(&path, &file).unwrap();
                run(&path, precision).unwrap_or_else(|error| panic!("{what}, one in {share}: {error}"));
            }
        }
    }
}

/// The same for settings that only latent attention and expert groups have.
#[test]
fn extreme_settings_of_latent_attention_are_refused_or_run() {
    let golden = golden("deepseek_v3");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    for name in ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(golden.join(name), path.join(name)).unwrap();
    }
    let config = std::fs::read(golden.join("config.json")).unwrap();
    let config: serde_json::Map<String, Value> = serde_json::from_slice(&config).unwrap();
    let (mut refused, mut ran) = (0, 0);
    for key in [
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "num_attention_heads",
        "n_group",
        "topk_group",
        "n_routed_experts",
        "num_experts_per_tok",
        "n_shared_experts",
        "first_k_dense_replace",
        "routed_scaling_factor",
    ] {
        for value in [0, 1, 2, 3, 4, 16, 1 << 16, 1 << 30, (1 << 30) + 1, 1 << 32, u64::MAX] {
            let mut config = config.clone();
            config.insert(key.into(), value.into());
            std::fs::write(path.join("config.json"), Value::Object(config).to_string()).unwrap();
            let (result, memory) = measure(|| run(path, Precision::Fast));
            assert!(memory.peak <= MOST, "{key} = {value}: {memory:?}");
            *(if result.is_ok() { &mut ran } else { &mut refused }) += 1;
        }
    }
    assert!(refused > 80 && ran > 10, "{refused} refused, {ran} ran");
}
