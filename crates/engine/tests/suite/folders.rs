//! Folders with safetensors files: the same model as its GGUF file, and quantised ones that match mlx-lm.

use std::path::{Path, PathBuf};

use forebay_engine::internals::format::{Format, ModelFile};
use forebay_engine::{Engine, Precision, Request};
use forebay_testing::{assert_same_bits, relative_error};
use serde_json::{Value, json};

use crate::common::folder_builder::{Folder, Tensor};
use crate::common::models::{Reference, data, logits, options, random_tokens, trained};

fn golden() -> PathBuf {
    data("golden/qwen3moe")
}

fn assert_exact(folder: &Path, reference: &str) {
    let reference = Reference::read(reference);
    let ours = logits(folder, &options(Precision::Exact), &reference.tokens);
    let error = relative_error(&ours, &reference.logits);
    assert!(error < 1e-3, "{}: relative error {error}", folder.display());
}

#[test]
fn exact_logits_of_the_golden_folder_equal_those_of_transformers() {
    assert_exact(&golden(), "golden/qwen3moe.logits.safetensors");
}

#[test]
fn exact_logits_of_mlx_weights_of_all_bits_and_groups_equal_those_of_mlx() {
    assert_exact(&data("golden/qwen3moe-mlx"), "golden/qwen3moe-mlx.logits.safetensors");
}

#[test]
fn exact_logits_of_fp8_weights_equal_those_of_mlx_on_dequantised_weights() {
    assert_exact(&data("golden/qwen3moe-fp8"), "golden/qwen3moe-fp8.logits.safetensors");
}

#[test]
fn the_trained_mlx_folder_computes_what_mlx_does() {
    let Some(folder) = trained("tales-qwen3moe-mlx-4bit") else { return };
    let reference = trained("tales-qwen3moe-mlx-4bit.logits.safetensors").unwrap();
    let reference = Reference::read(reference.to_str().unwrap());
    for (precision, limit) in [(Precision::Exact, 1e-3), (Precision::Fast, 3e-2)] {
        let ours = logits(&folder, &options(precision), &reference.tokens);
        let error = relative_error(&ours, &reference.logits);
        assert!(error < limit, "{precision:?}: relative error {error}");
    }
}

/// Compares with the bits of the golden model's GGUF file, which has the same weights.
fn assert_bits_of_the_gguf(folder: &Path, what: &str) {
    let tokens = Reference::read("golden/qwen3moe.logits.safetensors").tokens;
    for precision in [Precision::Fast, Precision::Exact] {
        let expected = logits(&data("golden/qwen3moe.gguf"), &options(precision), &tokens);
        let ours = logits(folder, &options(precision), &tokens);
        assert_same_bits(&ours, &expected, &format!("{what}, {precision:?}"));
    }
}

#[test]
fn a_folder_gives_the_bits_of_the_gguf_file() {
    assert_bits_of_the_gguf(&golden(), "as it is");
}

#[test]
fn a_model_may_be_named_by_its_folder_or_any_of_its_files() {
    let temporary = tempfile::tempdir().unwrap();
    Folder::read(&golden()).write_sharded(temporary.path(), 3);
    for name in ["", "config.json", "model.safetensors.index.json", "model-00002-of-00003.safetensors"] {
        assert_bits_of_the_gguf(&temporary.path().join(name), name);
    }
}

#[test]
fn experts_may_be_fused_and_the_text_model_may_be_part_of_a_larger_one() {
    for (prefix, head) in
        [("model.language_model.", "lm_head."), ("language_model.model.", "language_model.lm_head.")]
    {
        let mut folder = Folder::read(&golden());
        fuse_experts(&mut folder);
        folder.rename(|name| match name.strip_prefix("model.") {
            Some(rest) => format!("{prefix}{rest}"),
            None => name.replace("lm_head.", head),
        });
        // Vision, audio and multi-token prediction are not part of the text model.
        for other in ["model.visual.patch_embed", "audio_tower.conv1", "patch_merge_mlp.linear_1", "mtp.fc"] {
            folder.add(format!("{other}.weight"), "F32", &[2], vec![0; 8]);
        }
        folder.add(format!("{prefix}layers.3.enorm.weight"), "F32", &[2], vec![0; 8]);
        let text = std::mem::take(&mut folder.config);
        folder.config.insert("architectures".into(), text["architectures"].clone());
        folder.config.insert("model_type".into(), json!("qwen3_vl_moe"));
        folder.config.insert("hidden_size".into(), json!(77));
        folder.config.insert("text_config".into(), Value::Object(text));
        folder.config.insert("num_nextn_predict_layers".into(), json!(1));
        let temporary = tempfile::tempdir().unwrap();
        folder.write(temporary.path());
        assert_bits_of_the_gguf(temporary.path(), prefix);
    }
}

/// As in Step 3.7.
#[test]
fn other_parts_may_stand_beside_a_text_model_without_a_prefix() {
    let mut folder = Folder::read(&golden());
    folder.config.insert("vision_config".into(), json!({ "depth": 1 }));
    for other in ["vision_model.conv1.weight", "vit_large_projector.weight", "model.vision_tower.norm.weight"]
    {
        folder.add(other, "F32", &[2], vec![0; 8]);
    }
    let temporary = tempfile::tempdir().unwrap();
    folder.write(temporary.path());
    assert_bits_of_the_gguf(temporary.path(), "beside vision");
}

/// Turns `experts.N.gate_proj` and so on into `experts.gate_up_proj` and `experts.down_proj`.
fn fuse_experts(folder: &mut Folder) {
    for layer in 0..3 {
        let (mut both, mut down) = (Vec::new(), Vec::new());
        for expert in 0..8 {
            let mut part = |part: &str| -> Tensor {
                folder.take(&format!("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"))
            };
            both.extend(part("gate").data);
            both.extend(part("up").data);
            down.extend(part("down").data);
        }
        folder.add(format!("model.layers.{layer}.mlp.experts.gate_up_proj"), "BF16", &[8, 64, 64], both);
        folder.add(format!("model.layers.{layer}.mlp.experts.down_proj"), "BF16", &[8, 64, 32], down);
    }
}

/// As mlx-lm stores gpt-oss: separate tensors for gate, up and down, and for their biases.
#[test]
fn alternating_experts_and_biases_may_be_apart() {
    let mut folder = Folder::read(&data("golden/gpt_oss"));
    // Settings that older files omit.
    folder.config.remove("layer_types").unwrap();
    folder.config.remove("swiglu_alpha").unwrap();
    const EXPERTS: usize = 8;
    const WIDTH: usize = 64;
    for layer in 0..4 {
        let prefix = format!("model.layers.{layer}.mlp.experts");
        for (part, from, first, step) in
            [("gate", "gate_up_proj", 0, 2), ("up", "gate_up_proj", 1, 2), ("down", "down_proj", 0, 1)]
        {
            let pick = |name: String, places: &mut dyn Iterator<Item = usize>| -> Vec<u8> {
                let data = &folder.tensors.iter().find(|t| t.name == name).unwrap().data;
                places.flat_map(|at| &data[2 * at..][..2]).copied().collect()
            };
            let mut places = (0..EXPERTS * WIDTH).map(|i| i * step + first);
            let biases = pick(format!("{prefix}.{from}_bias"), &mut places);
            let mut places = (0..EXPERTS * WIDTH * WIDTH).map(|i| {
                let (expert, row, column) = (i / WIDTH / WIDTH, i / WIDTH % WIDTH, i % WIDTH);
                (expert * WIDTH + column) * WIDTH * step + row * step + first
            });
            let weights = pick(format!("{prefix}.{from}"), &mut places);
            folder.add(format!("{prefix}.{part}_proj.bias"), "BF16", &[EXPERTS, WIDTH], biases);
            folder.add(format!("{prefix}.{part}_proj.weight"), "BF16", &[EXPERTS, WIDTH, WIDTH], weights);
        }
        for name in ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"] {
            folder.take(&format!("{prefix}.{name}"));
        }
    }
    let temporary = tempfile::tempdir().unwrap();
    folder.write(temporary.path());
    let tokens = Reference::read("golden/gpt_oss.logits.safetensors").tokens;
    for precision in [Precision::Fast, Precision::Exact] {
        let expected = logits(&data("golden/gpt_oss.gguf"), &options(precision), &tokens);
        let ours = logits(temporary.path(), &options(precision), &tokens);
        assert_same_bits(&ours, &expected, &format!("{precision:?}"));
    }
}

#[test]
fn older_settings_mean_the_same_as_newer_ones() {
    let mut folder = Folder::read(&golden());
    let rope = folder.config.remove("rope_parameters").unwrap();
    folder.config.insert("rope_theta".into(), rope["rope_theta"].clone());
    folder.config.insert("rope_scaling".into(), Value::Null);
    let experts = folder.config.remove("num_local_experts").unwrap();
    folder.config.insert("num_experts".into(), experts);
    folder.config.remove("architectures");
    let temporary = tempfile::tempdir().unwrap();
    folder.write(temporary.path());
    assert_bits_of_the_gguf(temporary.path(), "older settings");
}

#[test]
fn the_format_and_the_recommended_sampling_are_read() {
    let format = |name: &str| ModelFile::open(&data(name)).unwrap().format;
    assert_eq!(format("golden/qwen3moe.gguf"), Format::Gguf);
    assert_eq!(format("golden/qwen3moe"), Format::HuggingFace);
    assert_eq!(format("golden/qwen3moe-mlx"), Format::Mlx);
    let engine = Engine::open(&data("golden/qwen3moe-mlx"), &options(Precision::Fast)).unwrap();
    let sampling = Request::new(&engine, Vec::new()).unwrap().sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (0.6, 0.95, 20));
    let ends: Vec<u32> = engine.tokenizer().end_tokens().iter().map(|t| t.0).collect();
    assert!(ends.contains(&511) && ends.contains(&510), "{ends:?}");
}

#[test]
fn parameters_are_counted_without_scales() {
    let count = |name: &str| ModelFile::open(&data(name)).unwrap().parameters();
    let plain = count("golden/qwen3moe");
    assert_eq!(count("golden/qwen3moe.gguf"), plain);
    assert_eq!(count("golden/qwen3moe-mlx"), plain);
    assert_eq!(count("golden/qwen3moe-fp8"), plain);
}

/// Latent attention splits one tensor in two and takes the rows of another as columns; in FP8 their scales must
/// follow.
#[test]
fn latent_attention_in_fp8_equals_the_dequantised_weights() {
    const TILE: usize = 16;
    const CODES: [(u8, f32); 4] = [(0x30, 0.5), (0xb8, -1.0), (0x39, 1.125), (0x01, 0.001953125)];
    let mut coded = Folder::read(&data("golden/deepseek_v3"));
    let mut plain = coded.clone();
    let scheme = json!({ "quant_method": "fp8", "weight_block_size": [TILE, TILE] });
    coded.config.insert("quantization_config".into(), scheme);
    for (layer, part) in (0..3).flat_map(|l| ["kv_a_proj_with_mqa", "kv_b_proj"].map(|part| (l, part))) {
        let name = format!("model.layers.{layer}.self_attn.{part}.weight");
        let shape = coded.take(&name).shape;
        plain.take(&name);
        let [rows, cols] = shape[..] else { panic!("{name} is a matrix") };
        let tiles = [rows.div_ceil(TILE), cols.div_ceil(TILE)];
        let scale = |tile: usize| 0.02 + tile as f32 / 256.0;
        let weight = |i: usize| CODES[(i * 7919 + layer) / 5 % 4];
        let value = |i: usize| weight(i).1 * scale(i / cols / TILE * tiles[1] + i % cols / TILE);
        let bytes = |floats: Vec<f32>| floats.into_iter().flat_map(f32::to_le_bytes).collect();
        plain.add(&name, "F32", &shape, bytes((0..rows * cols).map(value).collect()));
        coded.add(&name, "F8_E4M3", &shape, (0..rows * cols).map(|i| weight(i).0).collect());
        let scales = (0..tiles[0] * tiles[1]).map(scale).collect();
        coded.add(format!("{name}_scale_inv"), "F32", &tiles, bytes(scales));
    }
    let tokens = random_tokens(20, 512, 21);
    let [coded, plain] = [coded, plain].map(|folder| {
        let temporary = tempfile::tempdir().unwrap();
        folder.write(temporary.path());
        logits(temporary.path(), &options(Precision::Exact), &tokens)
    });
    assert_same_bits(&coded, &plain, "FP8");
}
