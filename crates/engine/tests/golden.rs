//! Logits against code we did not write: Hugging Face transformers in f32, and llama.cpp.

#[path = "common/models.rs"]
mod common;

use common::{DENSE, MIXTURES, Reference, containers, demo_model, logits, options, relative_error, trained};
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

/// A trained model of each of these families, in all containers.
const TRAINED: [&str; 1] = ["tales-qwen35moe"];

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
            let ours = logits(&model, &options(precision), &reference.tokens);
            let error = relative_error(&ours, &reference.logits);
            assert!(error < tolerance, "{}: relative error {error}", model.display());
        }
    }
}
