//! A second set of tiny models, in `../shared/golden2` beside the checkout, with other shapes than those of the repository.

use std::path::PathBuf;

use forebay_engine::{Engine, ExpertMemory, Options, Precision, TokenId};
use forebay_testing::{assert_same_bits, relative_error, shared};

use crate::common::models::{Reference, logits, options};

/// The families. Files of some cannot give the reference's logits after this many tokens.
const FAMILIES: &[(&str, Option<usize>)] = &[
    ("hy_v3", None),
    ("exaone_moe", None),
    ("afmoe", None),
    ("ernie4_5_moe", None),
    ("hunyuan_v1_moe", None),
    ("solar_open", None),
    ("qwen3_vl_moe", None),
    ("qwen3_5", None),
    ("mistral4", None),
    ("gemma4", None),
    ("cohere2_moe", None),
    ("lfm2_moe", None),
    ("step3p5", None),
    ("mimo_v2_flash", None),
    ("laguna", None),
    ("llama4", Some(15)),
];

/// The GGUF file and the folder of each family, with the reference, which a file that lacks settings follows only at
/// the beginning.
fn models() -> impl Iterator<Item = (PathBuf, Reference)> {
    FAMILIES.iter().flat_map(|&(name, gguf_tokens)| {
        let containers = [(format!("golden2/{name}.gguf"), gguf_tokens), (format!("golden2/{name}"), None)];
        containers.into_iter().filter_map(move |(model, tokens)| {
            let model = shared(&model)?;
            let path = shared(&format!("golden2/{name}.logits.safetensors"))?;
            let mut reference = Reference::read(path.to_str().unwrap());
            if let Some(tokens) = tokens {
                let vocab = reference.logits.len() / reference.tokens.len();
                reference.tokens.truncate(tokens);
                reference.logits.truncate(tokens * vocab);
            }
            Some((model, reference))
        })
    })
}

#[test]
fn exact_logits_equal_those_of_transformers() {
    let mut wrong = Vec::new();
    for (model, reference) in models() {
        let ours = std::panic::catch_unwind(|| logits(&model, &options(Precision::Exact), &reference.tokens));
        let error = ours.map_or(f64::NAN, |ours| relative_error(&ours, &reference.logits));
        println!("{}: {error:.1e}", model.display());
        if error.is_nan() || error >= 1e-3 {
            wrong.push((model, error));
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// However the prompt is cut, on however many threads, and wherever the experts are.
#[test]
fn chunks_threads_and_memory_change_no_bit() {
    for (model, reference) in models() {
        for precision in [Precision::Fast, Precision::Exact] {
            let run = |options: Options| run(&model, &options.precision(precision), &reference.tokens);
            let whole = run(Options::new().threads(2));
            for (chunk, threads) in [(1, 1), (7, 2), (33, 3)] {
                let cut = run(Options::new().chunk(chunk).threads(threads));
                assert_same_bits(&cut, &whole, &format!("{}, chunks of {chunk}", model.display()));
            }
            let streamed = Options::new().threads(2).expert_memory(ExpertMemory::Percent(40.0));
            assert_same_bits(&run(streamed), &whole, &format!("{}, streamed", model.display()));
        }
    }
}

fn run(model: &std::path::Path, options: &Options, tokens: &[TokenId]) -> Vec<f32> {
    let engine = Engine::open(model, options).unwrap();
    let mut session = engine.session();
    let mut rows = engine.all_logits(&mut session, tokens).unwrap();
    let mut all = Vec::new();
    while let Some((_, row)) = rows.next_row().unwrap() {
        all.extend_from_slice(row);
    }
    all
}
