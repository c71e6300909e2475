//! Batches of every size, which use different kernels. Each gives the logits that the CPU computes for each
//! conversation alone.

use std::path::{Path, PathBuf};

use forebay_engine::internals::synth::{FAMILIES, Order, Shape, Synthesis, TypeChoice};
use forebay_engine::{Cancel, Engine, Precision, Session, TokenId, Turn};
use forebay_kernels::DType;
use forebay_testing::{relative_error, worst};

use crate::device::{TestDevice, open, with};
use crate::models::{logits, options, random_tokens};
use crate::tiny_model::{EXPERTS, INNER, VOCAB, tiny_model};

const VOCABULARY: u32 = 300;

/// A model with experts of one type, and the down matrices of another.
fn write_model(folder: &Path, family: &str, types: [DType; 2], shape: Shape, changes: &[&str]) -> PathBuf {
    let family = FAMILIES.iter().find(|f| f.name == family).unwrap();
    let [all, down] = types;
    let order = Order {
        family,
        shape,
        changes: changes.iter().map(|change| change.parse().unwrap()).collect(),
        types: TypeChoice { all: Some(all), down: Some(down), output: Some(down), experts: None },
        vocabulary: VOCABULARY.into(),
        skew: 0.3,
        seed: 5,
    };
    let path = folder.join(format!("{}-{all}-{down}.gguf", family.name));
    let synthesis = Synthesis::new(&path, &order).unwrap();
    assert!(synthesis.fallbacks.is_empty(), "{:?}", synthesis.fallbacks);
    let mut file = std::fs::File::create(&path).unwrap();
    synthesis.write(&mut file, &Cancel::default(), &mut |_| ()).unwrap();
    path
}

/// Computes one step of conversations of these lengths, and returns each one's error against the CPU.
fn errors_of_a_step(ours: &Engine, truth: &Engine, lengths: &[usize]) -> Vec<f64> {
    let count = lengths.len();
    let prompts: Vec<Vec<TokenId>> = (lengths.iter().enumerate())
        .map(|(i, &length)| random_tokens(length, VOCABULARY, i as u64))
        .collect();
    let open = |prompt: &Vec<TokenId>| -> Session {
        let mut session = ours.session();
        session.extend(prompt).unwrap();
        session
    };
    let mut sessions: Vec<Session> = prompts.iter().map(open).collect();
    let tokens: Vec<[TokenId; 1]> = (0..count).map(|i| [TokenId(i as u32 * 11 % VOCABULARY)]).collect();
    let turns = sessions.iter_mut().zip(&tokens);
    let mut turns: Vec<Turn<'_>> =
        turns.map(|(session, tokens)| Turn { session, tokens, logits: true, marks: &[] }).collect();
    let mut logits = vec![Vec::new(); count];
    let mut step = ours.step(&mut turns, &Cancel::default()).unwrap();
    while let Some((i, mut row)) = step.next_row().unwrap() {
        logits[i] = row.all().unwrap().to_vec();
    }
    step.finish().unwrap();
    let error = |i: usize| {
        let mut alone = truth.session();
        alone.extend(&prompts[i]).unwrap();
        alone.push(tokens[i][0]).unwrap();
        relative_error(&logits[i], alone.logits())
    };
    (0..count).map(error).collect()
}

/// Random routers sometimes choose another expert after rounding, so a few rows may differ.
fn assert_close(what: &str, errors: &[f64]) {
    let close = errors.iter().filter(|&&error| error < 1e-2).count();
    let most = worst(errors.iter().copied());
    println!("{what}: {close} of {} within 1e-2, at most {most:.2e}", errors.len());
    let spared = if errors.len() < 3 { 0 } else { 1 + errors.len() / 10 };
    assert!(most.is_finite() && close + spared >= errors.len(), "{what}: {errors:?}");
}

pub fn batches_of_every_size_and_type_are_what_each_conversation_is_alone<D: TestDevice>() {
    use DType::*;
    let device = open::<D>(None);
    let folder = tempfile::tempdir().unwrap();
    // The experts' rows are not a multiple of any kernel's block.
    let shape = Shape {
        layers: Some(1),
        hidden: Some(512),
        inter: Some(256),
        experts: Some(20),
        top_k: Some(3),
        heads: Some(6),
        kv_heads: Some(2),
        head_dim: Some(128),
        ctx: Some(256),
    };
    let cases: [([DType; 2], &[usize]); 13] = [
        ([Q4_K, Q6_K], &[1, 2, 6, 11, 33]),
        ([Q6_K, Q5_K], &[1, 6, 33]),
        ([Q5_K, Q4_K], &[6]),
        ([Q8_0, Q4_0], &[6]),
        ([BF16, F16], &[3, 6]),
        ([Q2_K, Q3_K], &[1, 6, 33]),
        ([IQ1_S, IQ1_M], &[1, 6]),
        ([IQ2_XXS, IQ2_XS], &[1, 6, 33]),
        ([IQ2_S, IQ3_XXS], &[6]),
        ([IQ3_S, IQ4_XS], &[6]),
        ([NVFP4, MXFP4], &[1, 6]),
        ([IQ4_NL, Q4_1], &[6]),
        ([Q5_0, Q5_1], &[6]),
    ];
    for (types, counts) in cases {
        let model = write_model(folder.path(), "qwen3moe", types, shape, &[]);
        let ours = Engine::open(&model, &with(device.clone(), Precision::Fast)).unwrap();
        let truth = Engine::open(&model, &options(Precision::Exact)).unwrap();
        for &count in counts {
            let what = format!("{} with {}, {count} together", types[0], types[1]);
            let lengths: Vec<usize> = (0..count).map(|i| 1 + i % 7).collect();
            assert_close(&what, &errors_of_a_step(&ours, &truth, &lengths));
        }
    }
}

/// Float weights have their own kernels, even if only one of two matrices that are multiplied together has float
/// weights.
pub fn gate_and_up_may_be_of_floats_and_not<D: TestDevice>() {
    const HIDDEN: u64 = 256;
    let device = open::<D>(None);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mixed.gguf");
    // The other matrices are F32.
    let mut file = tiny_model(HIDDEN);
    for name in ["blk.0.ffn_up_exps.weight", "blk.1.ffn_gate_exps.weight"] {
        let blocks = (HIDDEN * INNER * EXPERTS) as usize / DType::Q8_0.block_len();
        let scale = half::f16::from_f32(0.001).to_le_bytes();
        let block = |i: usize| scale.into_iter().chain((0..32).map(move |j| (i * 73 + j * j * 29) as u8));
        let dims = [HIDDEN, INNER, EXPERTS];
        let q8_0 = (0..).find(|&id| DType::from_ggml(id) == Some(DType::Q8_0)).unwrap();
        file = file.without_tensor(name).tensor_of(name, q8_0, &dims, (0..blocks).flat_map(block).collect());
    }
    std::fs::write(&path, file.build()).unwrap();
    let on_device = with(device, Precision::Fast);
    for count in [1, 7, 80] {
        let tokens = random_tokens(count, VOCAB as u32, 3);
        let [ours, truth] =
            [&on_device, &options(Precision::Exact)].map(|options| logits(&path, options, &tokens));
        let error = relative_error(&ours, &truth);
        println!("{count} tokens: {error:.1e}");
        assert!(error < 1e-2, "{count} tokens: {error}");
    }
}

/// Heads of every shape and number; conversations that end at, before and after a group of keys; windows; sinks;
/// rotations of some channels or of neighbours. With few rows, positions are split among blocks; with many they are
/// not.
pub fn steps_of_long_conversations_see_what_they_should<D: TestDevice>() {
    let device = open::<D>(None);
    let folder = tempfile::tempdir().unwrap();
    let shape = |heads: u64, kv_heads: u64, head_dim: u64| Shape {
        layers: Some(1),
        hidden: Some(64),
        inter: Some(32),
        experts: Some(4),
        // Every expert is chosen, so that rounding cannot change the choice.
        top_k: Some(4),
        heads: Some(heads),
        kv_heads: Some(kv_heads),
        head_dim: Some(head_dim),
        ctx: Some(512),
    };
    let dense =
        |heads, kv_heads, head_dim| Shape { experts: None, top_k: None, ..shape(heads, kv_heads, head_dim) };
    let rotated = |channels: usize| format!("rope.dimension_count={channels}");
    let many: Vec<usize> = (0..70).map(|i| [130, 260, 128, 7].get(i).copied().unwrap_or(1)).collect();
    let cases: [(&str, Shape, String, &[&[usize]]); 7] = [
        ("qwen3", dense(9, 1, 80), rotated(80), &[&[127], &[128], &[129], &[300], &[1, 140, 257]]),
        ("qwen3", dense(4, 2, 256), rotated(256), &[&[131], &[5, 64]]),
        // So many layers that the first ones are started before the others are recorded.
        (
            "qwen3",
            Shape { layers: Some(6), ..dense(16, 2, 128) },
            rotated(128),
            &[&[129], &[300], &[2, 128, 257]],
        ),
        ("qwen3", dense(8, 8, 16), rotated(16), &[&[200], &many]),
        ("llama", dense(6, 2, 48), rotated(48), &[&[150], &[63, 129]]),
        ("glm4moe", shape(6, 2, 64), rotated(32), &[&[150], &[128, 2]]),
        ("gpt-oss", shape(6, 2, 64), "attention.sliding_window=70".into(), &[&[60], &[199], &[70, 135, 300]]),
    ];
    for (family, shape, change, batches) in cases {
        let what = format!("{family} with {:?} of {:?} heads", shape.kv_heads, shape.heads);
        let model = write_model(folder.path(), family, [DType::F32; 2], shape, &[&change]);
        let ours = Engine::open(&model, &with(device.clone(), Precision::Fast)).unwrap();
        let truth = Engine::open(&model, &options(Precision::Exact)).unwrap();
        for lengths in batches {
            let errors = errors_of_a_step(&ours, &truth, lengths);
            let most = worst(errors.iter().copied());
            println!("{what}, {} together: {most:.1e}", lengths.len());
            assert!(most < D::ATTENTION, "{what}, {lengths:?}: {errors:?}");
        }
    }
}
