//! Logits against code we did not write: Hugging Face transformers in f32, and llama.cpp.

#[path = "common/models.rs"]
mod common;

use common::{
    DENSE, MIXTURES, Reference, containers, data, demo_model, logits, options, relative_error, shared_model,
};
use forebay_engine::Precision;

#[test]
fn exact_logits_of_the_tiny_models_equal_those_of_others() {
    for family in MIXTURES.into_iter().chain(DENSE) {
        let reference = Reference::read(&format!("golden/{family}.logits.safetensors"));
        for model in containers(family) {
            let ours = logits(&model, &options(Precision::Exact), &reference.tokens);
            let error = relative_error(&ours, &reference.logits);
            assert!(error < 1e-3, "{}: relative error {error}", model.display());
        }
    }
}

/// V2's router chooses groups by their best expert; the tiny V3 does so by the best two.
#[test]
fn exact_logits_of_a_softmax_router_with_groups_equal_those_of_transformers() {
    let reference = Reference::read("golden/deepseek_v2-groups.logits.safetensors");
    let ours = logits(&data("golden/deepseek_v2-groups"), &options(Precision::Exact), &reference.tokens);
    let error = relative_error(&ours, &reference.logits);
    assert!(error < 1e-3, "relative error {error}");
}

/// Files from before latent attention had a form of its own hold the same weights in another arrangement.
#[test]
fn exact_logits_of_an_old_file_with_latents_equal_those_of_the_new_one() {
    let reference = Reference::read("golden/deepseek_v2_lite.logits.safetensors");
    let ours =
        logits(&data("golden/deepseek_v2_lite-kv_b.gguf"), &options(Precision::Exact), &reference.tokens);
    let error = relative_error(&ours, &reference.logits);
    assert!(error < 1e-3, "relative error {error}");
}

#[test]
fn exact_logits_of_the_demo_model_equal_those_of_transformers() {
    let reference = Reference::read("golden/tales-qwen3moe-Q4_K_M.f32.logits.safetensors");
    let ours = logits(&demo_model(), &options(Precision::Exact), &reference.tokens);
    let error = relative_error(&ours, &reference.logits);
    assert!(error < 1e-3, "relative error {error}");
}

#[test]
fn fast_logits_of_the_demo_model_are_close_to_those_of_llama_cpp() {
    let reference = Reference::read("golden/tales-qwen3moe-Q4_K_M.llamacpp.logits.safetensors");
    let ours = logits(&demo_model(), &options(Precision::Fast), &reference.tokens);
    let error = relative_error(&ours, &reference.logits);
    assert!(error < 3e-2, "relative error {error}");
}

/// The error of a trained model beside the checkout, if there is one.
fn error_of_shared(model: &str, reference: &str, precision: Precision) -> Option<f64> {
    let reference = Reference::read_from(&shared_model(&format!("{reference}.logits.safetensors"))?);
    let ours = logits(&shared_model(model)?, &options(precision), &reference.tokens);
    Some(relative_error(&ours, &reference.logits))
}

#[test]
fn exact_logits_of_trained_folders_equal_those_of_others() {
    for (model, reference) in [
        ("tales-deepseek_v3", "tales-deepseek_v3.hf"),
        ("tales-deepseek_v3-mlx-4bit", "tales-deepseek_v3-mlx-4bit"),
    ] {
        if let Some(error) = error_of_shared(model, reference, Precision::Exact) {
            assert!(error < 1e-3, "{model}: relative error {error}");
        }
    }
}

#[test]
fn fast_logits_of_trained_models_are_close_to_those_of_llama_cpp() {
    for model in ["tales-deepseek_v3-Q4_K_M"] {
        let error = error_of_shared(&format!("{model}.gguf"), &format!("{model}.llamacpp"), Precision::Fast);
        if let Some(error) = error {
            assert!(error < 3e-2, "{model}: relative error {error}");
        }
    }
}
