//! Models and reference logits for the tests.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use forebay_engine::{Engine, Options, Precision, Routed, TokenId};
use forebay_testing::{relative_error, worst};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use safetensors::SafeTensors;

/// The engine's folder. Other crates use its models, too.
fn engine_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("engine")
}

/// The demo model of the repository.
pub fn demo_model() -> PathBuf {
    engine_folder().join("../../models/tales-qwen3moe-Q4_K_M.gguf")
}

/// Logits of the demo model, computed in f32 by transformers.
pub const DEMO_LOGITS: &str = "golden/tales-qwen3moe-Q4_K_M.f32.logits.safetensors";

/// Models with unusual features, each a folder.
pub const PECULIAR: &[&str] = &[
    "deepseek_v2-groups",
    "glm4_moe_lite",
    "gpt_oss-mxfp4",
    "glm4moe-mtp",
    "hunyuan_v1_moe-alpha",
    "bailingmoe-head",
    "smallthinker-softmax",
    "mimo_v2_flash-size",
    "gemma3-scale",
    "cohere2_moe-rms",
    "phimoe-longrope",
];

/// Every tiny model, and the name of the logits that another program computed.
pub fn tiny_models() -> Vec<(PathBuf, String)> {
    let families = MIXTURES.iter().chain(DENSE);
    let named = |name: &str| format!("golden/{name}.logits.safetensors");
    let both = families.flat_map(|family| {
        let [file, folder] = containers(family);
        let of_file = if LACKING.contains(family) { format!("{family}-plain") } else { (*family).to_owned() };
        [(file, named(&of_file)), (folder, named(family))]
    });
    let peculiar = PECULIAR.iter().map(|name| (data(&format!("golden/{name}")), named(name)));
    let old = (data("golden/deepseek_v2_lite-kv_b.gguf"), named("deepseek_v2_lite"));
    both.chain(peculiar).chain([old]).collect()
}

/// Tiny random models of the families, with experts, each as a GGUF file and as a folder.
pub const MIXTURES: &[&str] = &[
    "qwen3moe",
    "mixtral",
    "olmoe",
    "qwen2moe",
    "minimax_m2",
    "glm4moe",
    "qwen3next",
    "qwen35moe",
    "gpt_oss",
    "deepseek_v2_lite",
    "deepseek_v3",
    "dots1",
    "gemma4",
    "cohere2_moe",
    "phimoe",
    "grovemoe",
    "nemotron_h_moe",
    "nemotron_h_latent",
    "hy_v3",
    "exaone_moe",
    "afmoe",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "solar_open",
    "qwen3_vl_moe",
    "mistral4",
    "lfm2_moe",
    "granitemoe",
    "bailingmoe",
    "bailingmoe2",
    "smallthinker",
    "step3p5",
    "mimo_v2_flash",
    "laguna",
    "llama4",
];
pub const DENSE: &[&str] = &[
    "qwen2",
    "qwen3",
    "llama",
    "llama3",
    "qwen3_5",
    "ministral3",
    "mistral",
    "gemma4_dense",
    "gemma3",
    "granite",
];

/// Families whose GGUF files lack settings, so that their logits are others than those of the folders.
const LACKING: &[&str] = &["mistral", "llama4"];

/// One of these for each kind of state that layers keep, and one with layers that keep nothing.
pub const KEEPING: [&str; 8] =
    ["qwen3moe", "qwen35moe", "gpt_oss", "deepseek_v3", "lfm2_moe", "gemma4", "llama4", "nemotron_h_moe"];

/// The same tiny model in both kinds of container.
pub fn containers(family: &str) -> [PathBuf; 2] {
    [data(&format!("golden/{family}.gguf")), data(&format!("golden/{family}"))]
}

/// A file or folder of the tests' data. Golden ones are unpacked first.
pub fn data(name: &str) -> PathBuf {
    match name.strip_prefix("golden/") {
        Some(packed) => forebay_testing::golden(packed),
        None => engine_folder().join("tests/data").join(name),
    }
}

/// A trained model or a file that belongs to one. They are too large for the repository and are beside it on some
/// machines.
pub fn trained(name: &str) -> Option<PathBuf> {
    forebay_testing::shared(&format!("models/{name}"))
}

pub fn options(precision: Precision) -> Options {
    Options::default().precision(precision).threads(2)
}

/// Logits that another program computed.
pub struct Reference {
    pub tokens: Vec<TokenId>,
    /// Of all positions, or of the last few.
    pub logits: Vec<f32>,
}

impl Reference {
    pub fn read(name: &str) -> Reference {
        let bytes = std::fs::read(data(name)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| -> Vec<[u8; 4]> {
            file.tensor(name).unwrap().data().chunks_exact(4).map(|b| b.try_into().unwrap()).collect()
        };
        Reference {
            tokens: words("tokens").into_iter().map(|b| TokenId(u32::from_le_bytes(b))).collect(),
            logits: words("logits").into_iter().map(f32::from_le_bytes).collect(),
        }
    }
}

/// The relative distance of a model's logits from a reference: ‖ours − reference‖ / ‖reference‖
pub fn distance(model: &Path, options: &Options, reference: &Reference) -> f64 {
    let ours = logits(model, options, &reference.tokens);
    relative_error(&ours[ours.len() - reference.logits.len()..], &reference.logits)
}

/// The logits of every position.
pub fn logits(model: &Path, options: &Options, tokens: &[TokenId]) -> Vec<f32> {
    let engine = Engine::open(model, options).unwrap();
    let (mut session, mut all) = (engine.session(), Vec::new());
    let mut rows = engine.all_logits(&mut session, tokens).unwrap();
    while let Some((_, row)) = rows.next_row().unwrap() {
        all.extend_from_slice(row);
    }
    all
}

/// Experts and their weights.
type Weighed = Vec<(u32, f32)>;

/// The logits of every position, and the experts that each used with their weights, in ascending order within each layer.
fn logits_and_experts(engine: &Engine, tokens: &[TokenId]) -> (Vec<Vec<f32>>, Vec<Weighed>) {
    let experts = Arc::new(Mutex::new(vec![Vec::new(); tokens.len()]));
    let seen = experts.clone();
    let mut session = engine.session();
    session.watch_routing(Some(Box::new(move |routed: Routed<'_>| {
        let mut seen = seen.lock().unwrap();
        let layer = routed.routing.experts().chunks_exact(routed.routing.top_k());
        assert_eq!(layer.len(), seen.len(), "the prompt is one chunk");
        for (token, (position, chosen)) in seen.iter_mut().zip(layer).enumerate() {
            let weights = routed.routing.ranks(token).map(|(_, weight)| weight);
            let mut chosen: Vec<_> = chosen.iter().copied().zip(weights).collect();
            chosen.sort_unstable_by_key(|(expert, _)| *expert);
            position.extend(chosen);
        }
    })));
    let mut logits = Vec::new();
    let mut rows = engine.all_logits(&mut session, tokens).unwrap();
    while let Some((_, row)) = rows.next_row().unwrap() {
        logits.push(row.to_vec());
    }
    drop(rows);
    drop(session);
    (logits, Arc::into_inner(experts).unwrap().into_inner().unwrap())
}

/// Asserts that logits at default precision, which rounds keys and values to f16, are within 1e-2 of exact ones. Random
/// routers sometimes score two experts so alike that this rounding changes the choice, or the weights where these jump.
/// Then the logits of that token and of all later tokens differ. So of each text, only the part before the first such
/// token is compared.
pub fn assert_close_by_default(model: &Path, by_default: &Options) {
    const TEXTS: u64 = 8;
    const LENGTH: usize = 16;
    let engines =
        [by_default, &options(Precision::Exact)].map(|options| Engine::open(model, options).unwrap());
    let (mut compared, mut errors) = (0, Vec::new());
    for seed in 0..TEXTS {
        let tokens = random_tokens(LENGTH, engines[0].vocab_size() as u32, seed);
        let [(ours, chosen), (truth, best)] = [0, 1].map(|i: usize| logits_and_experts(&engines[i], &tokens));
        assert_eq!([ours.len(), truth.len(), chosen.len(), best.len()], [LENGTH; 4]);
        let is_alike = |(a, b): (&(u32, f32), &(u32, f32))| a.0 == b.0 && (a.1 - b.1).abs() < 0.2;
        let alike = chosen.iter().zip(&best).take_while(|(a, b)| a.iter().zip(*b).all(is_alike)).count();
        errors.extend((0..alike).map(|i| relative_error(&ours[i], &truth[i])));
        // The later logits may differ, but must be finite.
        assert!(ours[alike..].iter().flatten().all(|logit| logit.is_finite()), "{}", model.display());
        compared += alike;
    }
    let worst = worst(errors);
    let (name, all) = (model.display(), TEXTS as usize * LENGTH);
    println!("{name}: {compared} of {all} tokens within {worst:.1e}");
    assert!(worst < 1e-2, "{name}: {worst}");
    assert!(4 * compared >= 3 * all, "{name}: experts differ before {} of {all} tokens", all - compared);
}

/// Random tokens below `vocab`, determined by the seed.
pub fn random_tokens(count: usize, vocab: u32, seed: u64) -> Vec<TokenId> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| TokenId(rng.next_u32() % vocab)).collect()
}
