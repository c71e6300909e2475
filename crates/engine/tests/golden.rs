//! Logits against code we did not write: Hugging Face transformers in f32, and llama.cpp.

#[path = "common/models.rs"]
mod common;
#[path = "common/gguf_builder.rs"]
mod gguf_builder;

use common::{
    DEMO_LOGITS, Reference, assert_close_by_default, data, demo_model, distance, logits, options,
    tiny_models, trained,
};
use forebay_engine::Precision;
use forebay_engine::format::ModelFile;
use forebay_testing::assert_same_bits;
use gguf_builder::{GgufBuilder, tensor_type};
use safetensors::SafeTensors;

/// Among them: V2's router, which chooses groups by their best expert, where the tiny V3 does so by the best two;
/// GLM-4.7-Flash, made of DeepSeek's parts; MXFP4 experts in a context of several windows; layers that predict further
/// tokens, which are skipped; a file from before latent attention had a form of its own.
#[test]
fn exact_logits_of_the_tiny_models_equal_those_of_others() {
    for (model, reference) in tiny_models() {
        let error = distance(&model, &options(Precision::Exact), &Reference::read(&reference));
        assert!(error < 1e-3, "{}: relative error {error}", model.display());
    }
}

/// But for one whose weights are quantised: there activations are rounded, too, and much more than keys and values.
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

/// A trained model of each of these families, in all containers.
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

/// Older GGUF files of Qwen3-Next have queries, keys, values and gates in one matrix, as checkpoints do.
#[test]
fn projections_in_one_matrix_give_the_bits_of_those_in_two() {
    let path = data("golden/qwen3next.gguf");
    let model = ModelFile::open(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let checkpoint = std::fs::read(data("golden/qwen3next/model.safetensors")).unwrap();
    let checkpoint = SafeTensors::deserialize(&checkpoint).unwrap();
    let mut older = GgufBuilder::with_entries_of(&bytes, &model.tensors[0].name);
    for tensor in &model.tensors {
        let name = |suffix| tensor.name.strip_suffix(suffix).and_then(|rest| rest.strip_prefix("blk."));
        if name(".attn_gate.weight").is_some() {
            continue;
        }
        if let Some(layer) = name(".attn_qkv.weight") {
            let name = format!("model.layers.{layer}.linear_attn.in_proj_qkvz.weight");
            let both = checkpoint.tensor(&name).unwrap().data().to_vec();
            older =
                older.tensor_of(format!("blk.{layer}.ssm_in.weight"), tensor_type::BF16, &[64, 192], both);
            continue;
        }
        let kind = match tensor.dtype.name() {
            "F32" => tensor_type::F32,
            "BF16" => tensor_type::BF16,
            other => panic!("{other}"),
        };
        let dims: Vec<u64> = tensor.shape.iter().rev().map(|&d| d as u64).collect();
        let start = tensor.offset as usize;
        let data = bytes[start..start + tensor.len as usize].to_vec();
        older = older.tensor_of(&tensor.name, kind, &dims, data);
    }
    let folder = tempfile::tempdir().unwrap();
    let path_of_older = folder.path().join("older.gguf");
    std::fs::write(&path_of_older, older.build()).unwrap();
    let tokens = Reference::read("golden/qwen3next.logits.safetensors").tokens;
    let [older, newer] =
        [&path_of_older, &path].map(|model| logits(model, &options(Precision::Exact), &tokens));
    assert_same_bits(&older, &newer, "one matrix");
}
