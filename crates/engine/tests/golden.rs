//! Logits against code we did not write: Hugging Face transformers in f32, and llama.cpp.

#[path = "common/models.rs"]
mod common;

use common::{DENSE, MIXTURES, Reference, containers, data, demo_model, distance, options};
use forebay_engine::Precision;

#[test]
fn exact_logits_of_the_tiny_models_equal_those_of_others() {
    for family in MIXTURES.into_iter().chain(DENSE) {
        let reference = Reference::read(&format!("golden/{family}.logits.safetensors"));
        for model in containers(family) {
            let error = distance(&model, &options(Precision::Exact), &reference);
            assert!(error < 1e-3, "{}: relative error {error}", model.display());
        }
    }
}

/// MXFP4 experts in a context of several windows, and layers that predict further tokens, which are skipped.
#[test]
fn exact_logits_of_published_peculiarities_equal_those_of_transformers() {
    for name in ["gpt_oss-mxfp4", "glm4moe-mtp"] {
        let reference = Reference::read(&format!("golden/{name}.logits.safetensors"));
        let error = distance(&data(&format!("golden/{name}")), &options(Precision::Exact), &reference);
        assert!(error < 1e-3, "{name}: relative error {error}");
    }
}

#[test]
fn exact_logits_of_the_demo_model_equal_those_of_transformers() {
    let reference = Reference::read("golden/tales-qwen3moe-Q4_K_M.f32.logits.safetensors");
    let error = distance(&demo_model(), &options(Precision::Exact), &reference);
    assert!(error < 1e-3, "relative error {error}");
}

#[test]
fn fast_logits_of_the_demo_model_are_close_to_those_of_llama_cpp() {
    let reference = Reference::read("golden/tales-qwen3moe-Q4_K_M.llamacpp.logits.safetensors");
    let error = distance(&demo_model(), &options(Precision::Fast), &reference);
    assert!(error < 3e-2, "relative error {error}");
}
