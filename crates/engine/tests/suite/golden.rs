//! Logits compared with other implementations: Hugging Face transformers in f32, and llama.cpp.

use forebay_engine::Precision;
use forebay_engine::internals::format::{Metadata, ModelFile, Value};
use forebay_testing::{assert_same_bits, relative_error};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use safetensors::SafeTensors;

use crate::common::gguf_builder::{GgufBuilder, Tensor, tensor_type};
use crate::common::models::{
    DEMO_LOGITS, DENSE, MIXTURES, Reference, assert_close_by_default, data, demo_model, distance, logits,
    options, random_tokens, tiny_models, trained,
};

/// The models include V2's router, which scores groups by their best expert, while the tiny V3 uses the best two;
/// GLM-4.7-Flash, which shares DeepSeek's architecture; MXFP4 experts in a context of several windows; layers for
/// multi-token prediction, which are skipped; a file from before GGUF had separate tensors for latent attention.
#[test]
fn exact_logits_of_the_tiny_models_equal_those_of_others() {
    for (model, reference) in tiny_models() {
        let error = distance(&model, &options(Precision::Exact), &Reference::read(&reference));
        assert!(error < 1e-3, "{}: relative error {error}", model.display());
    }
}

/// Except for a model with quantised weights, where activations are quantised too, which changes more than keys and
/// values.
#[test]
fn logits_of_the_tiny_models_are_close_by_default() {
    for (model, _) in tiny_models().into_iter().filter(|(model, _)| !model.ends_with("gpt_oss-mxfp4")) {
        assert_close_by_default(&model, &options(Precision::Fast));
    }
}

#[test]
fn exact_logits_of_the_demo_model_equal_those_of_transformers() {
    let reference = Reference::read(DEMO_LOGITS);
    let error = distance(&demo_model(), &options(Precision::Exact), &reference);
    assert!(error < 1e-3, "relative error {error}");
}

#[test]
fn fast_logits_of_the_demo_model_are_close_to_those_of_llama_cpp() {
    let reference = Reference::read("golden/tales-qwen3moe-Q4_K_M.llamacpp.logits.safetensors");
    let error = distance(&demo_model(), &options(Precision::Fast), &reference);
    assert!(error < 3e-2, "relative error {error}");
}

/// One trained model of each of these families, in all formats.
const TRAINED: [&str; 2] = ["tales-qwen35moe", "tales-deepseek_v3"];

#[test]
fn logits_of_trained_models_are_those_of_others() {
    for name in TRAINED {
        let containers = [
            (name.to_owned(), format!("{name}.hf"), Precision::Exact, 1e-3),
            (format!("{name}-mlx-4bit"), format!("{name}-mlx-4bit"), Precision::Exact, 1e-3),
            (format!("{name}-Q4_K_M.gguf"), format!("{name}-Q4_K_M.llamacpp"), Precision::Fast, 3e-2),
        ];
        for (model, reference, precision, tolerance) in containers {
            let Some(model) = trained(&model) else { continue };
            let reference = trained(&format!("{reference}.logits.safetensors")).unwrap();
            let reference = Reference::read(reference.to_str().unwrap());
            let error = distance(&model, &options(precision), &reference);
            assert!(error < tolerance, "{}: relative error {error}", model.display());
        }
    }
}

/// Older GGUF files of Qwen3-Next store queries, keys, values and gates in one matrix, like checkpoints.
#[test]
fn projections_in_one_matrix_give_the_bits_of_those_in_two() {
    let path = data("golden/qwen3next.gguf");
    let checkpoint = std::fs::read(data("golden/qwen3next/model.safetensors")).unwrap();
    let checkpoint = SafeTensors::deserialize(&checkpoint).unwrap();
    let mut older = GgufBuilder::copy_of(&path);
    for name in older.names() {
        let name = |suffix| name.strip_suffix(suffix).and_then(|rest| rest.strip_prefix("blk."));
        let Some(layer) = name(".attn_gate.weight") else { continue };
        older.take(&format!("blk.{layer}.attn_gate.weight")).unwrap();
        older.take(&format!("blk.{layer}.attn_qkv.weight")).unwrap();
        let name = format!("model.layers.{layer}.linear_attn.in_proj_qkvz.weight");
        let both = checkpoint.tensor(&name).unwrap().data().to_vec();
        older = older.tensor_of(format!("blk.{layer}.ssm_in.weight"), tensor_type::BF16, &[64, 192], both);
    }
    let folder = tempfile::tempdir().unwrap();
    let path_of_older = folder.path().join("older.gguf");
    std::fs::write(&path_of_older, older.build()).unwrap();
    let tokens = Reference::read("golden/qwen3next.logits.safetensors").tokens;
    let [older, newer] =
        [&path_of_older, &path].map(|model| logits(model, &options(Precision::Exact), &tokens));
    assert_same_bits(&older, &newer, "one matrix");
}

/// Converters may write queries, keys and values as one tensor, and their biases as one or three.
#[test]
fn queries_keys_and_values_in_one_tensor_give_the_bits_of_those_in_three() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = random_tokens(16, 256, 1);
    let mut families = 0;
    for family in MIXTURES.iter().chain(DENSE).copied() {
        let path = data(&format!("golden/{family}.gguf"));
        let apart = GgufBuilder::copy_of(&path);
        let (weights, weights_and_biases) =
            (fused(apart.clone(), &["weight"]), fused(apart, &["weight", "bias"]));
        if weights.is_none() {
            let is_latent = family.starts_with("deepseek") || family == "mistral4";
            assert!(is_latent || family.starts_with("bailing"), "{family} has no tensors to fuse");
            continue;
        }
        let truth = logits(&path, &options(Precision::Exact), &tokens);
        for file in [weights, weights_and_biases].into_iter().flatten() {
            let path = folder.path().join("fused.gguf");
            std::fs::write(&path, file.build()).unwrap();
            assert_same_bits(&logits(&path, &options(Precision::Exact), &tokens), &truth, family);
        }
        families += 1;
    }
    assert_eq!(families, MIXTURES.len() + DENSE.len() - 4);
}

/// Mistral-Large-3's files have the architecture of DeepSeek-V2, a router like Mistral-Small-4's and its temperature.
#[test]
fn files_of_mistral_large_3_sharpen_late_queries() {
    let path = data("golden/mistral4.gguf");
    let mut settings = Metadata::default();
    for (key, value) in ModelFile::open(&path).unwrap().metadata.iter() {
        let value = match key {
            "general.architecture" => Value::String("deepseek2".into()),
            _ => value.clone(),
        };
        settings.insert(key.replace("mistral4.", "deepseek2."), value).unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let large = folder.path().join("large.gguf");
    let reference = Reference::read("golden/mistral4.logits.safetensors");
    std::fs::write(&large, GgufBuilder::copy_of(&path).with_metadata(&settings).build()).unwrap();
    let error = distance(&large, &options(Precision::Exact), &reference);
    assert!(error < 1e-3, "relative error {error}");
}

/// The file with `attn_q`, `attn_k` and `attn_v` joined if it has all three: weights, biases, or both.
fn fused(mut file: GgufBuilder, kinds: &[&str]) -> Option<GgufBuilder> {
    let mut joined = 0;
    for name in file.names() {
        let Some((layer, kind)) = name.split_once(".attn_k.").filter(|(_, kind)| kinds.contains(kind)) else {
            continue;
        };
        // Some layers' values are their keys.
        if !file.names().contains(&format!("{layer}.attn_v.{kind}")) {
            continue;
        }
        let parts = ["q", "k", "v"].map(|part| file.take(&format!("{layer}.attn_{part}.{kind}")).unwrap());
        assert!(parts.iter().all(|part| part.tensor_type == parts[0].tensor_type));
        let mut dims = parts[0].dims.clone();
        *dims.last_mut().unwrap() = parts.iter().map(|part| part.dims.last().unwrap()).sum();
        let data = parts.iter().flat_map(|part| part.data.clone()).collect();
        file = file.tensor_of(format!("{layer}.attn_qkv.{kind}"), parts[0].tensor_type, &dims, data);
        joined += 1;
    }
    (joined > 0).then_some(file)
}

/// Converters write a scale next to each NVFP4 matrix (one per expert next to a stack), and another one for
/// activations, which is ignored.
#[test]
fn scales_of_nvfp4_matrices_multiply_their_weights() {
    let folder = tempfile::tempdir().unwrap();
    let [scaled, plain] = ["scaled.gguf", "plain.gguf"].map(|name| folder.path().join(name));
    let tokens = random_tokens(16, 256, 2);
    for family in ["qwen3", "qwen3moe", "glm4moe", "deepseek_v3"] {
        let mut random = ChaCha8Rng::seed_from_u64(3);
        let mut with_scales = GgufBuilder::copy_of(&data(&format!("golden/{family}.gguf")));
        let mut in_f32 = with_scales.clone();
        let (mut matrices, mut stacks) = (0, 0);
        for name in in_f32.names().iter().filter(|name| !name.contains("ffn_gate_inp")) {
            let tensor = in_f32.take(name).unwrap();
            if tensor.dims.len() < 2 || !tensor.dims[0].is_multiple_of(64) {
                in_f32 = in_f32.tensor_of(name, tensor.tensor_type, &tensor.dims, tensor.data);
                continue;
            }
            let is_stack = name.contains("_exps.");
            let count = if is_stack { tensor.dims[2] } else { 1 };
            matrices += 1;
            stacks += usize::from(is_stack);
            let scales: Vec<f32> =
                (0..count).map(|_| 0.5 + random.next_u32() as f32 / u32::MAX as f32).collect();
            let (blocks, weights) = nvfp4(&tensor, &scales, &mut random);
            in_f32 = in_f32.tensor_of(name, tensor_type::F32, &tensor.dims, weights);
            let floats = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let module = name.strip_suffix(".weight").unwrap();
            let companion = |name: &str| format!("{module}.{name}");
            let input_scales = vec![7.0; scales.len()];
            with_scales = with_scales
                .without_tensor(name)
                .tensor_of(name, tensor_type::NVFP4, &tensor.dims, blocks)
                .tensor_of(companion("scale"), tensor_type::F32, &[count], floats(&scales))
                .tensor_of(companion("input_scale"), tensor_type::F32, &[count], floats(&input_scales));
        }
        assert!(matrices >= 10, "{family}: only {matrices} matrices have scales");
        assert!(family == "qwen3" || stacks >= 2, "{family}: only {stacks} stacks of experts have scales");
        std::fs::write(&scaled, with_scales.build()).unwrap();
        std::fs::write(&plain, in_f32.build()).unwrap();
        let truth = logits(&plain, &options(Precision::Exact), &tokens);
        let error = relative_error(&logits(&scaled, &options(Precision::Exact), &tokens), &truth);
        assert!(error < 1e-4, "{family}: relative error {error}");
        if family == "qwen3" {
            let error = relative_error(&logits(&scaled, &options(Precision::Fast), &tokens), &truth);
            assert!(error < 5e-2, "{family}: relative error {error} with quantised activations");
        }
    }
}

/// Random NVFP4 blocks for a tensor, and the f32 weights that they represent. A block of 64 weights has four scales
/// (E4M3 without sign), then four times 16 codes (E2M1); a byte holds the first and the ninth code, and so on.
fn nvfp4(tensor: &Tensor, scales: &[f32], random: &mut ChaCha8Rng) -> (Vec<u8>, Vec<u8>) {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let count = tensor.dims.iter().product::<u64>() as usize;
    let (mut blocks, mut weights) = (Vec::new(), vec![0.0f32; count]);
    for (i, block) in weights.chunks_exact_mut(64).enumerate() {
        let matrix_scale = scales[i * 64 * scales.len() / count];
        // From 1/32 to 1/8: rows of about 64 weights keep activations in range.
        let scale_bytes: [u8; 4] = std::array::from_fn(|_| (2 << 3) + (random.next_u32() % 16) as u8);
        blocks.extend(scale_bytes);
        for (group, byte) in block.chunks_exact_mut(16).zip(scale_bytes) {
            let scale =
                (1.0 + f32::from(byte & 7) / 8.0) * 2f32.powi(i32::from(byte >> 3) - 7) * matrix_scale;
            let weight =
                |code: u8| MAGNITUDES[usize::from(code & 7)] * if code & 8 == 0 { scale } else { -scale };
            for first in 0..8 {
                let codes = random.next_u32() as u8;
                (group[first], group[first + 8]) = (weight(codes & 15), weight(codes >> 4));
                blocks.push(codes);
            }
        }
    }
    (blocks, weights.iter().flat_map(|weight| weight.to_le_bytes()).collect())
}
