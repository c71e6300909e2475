//! Models that cannot be run are refused before they are loaded, with the name of the file, the key or the tensor.

use forebay_engine::internals::memory::Machine;
use forebay_engine::{Engine, Error, Options, Request, Result, TokenId};

use crate::common::gguf_builder::{GgufBuilder, tensor_type};
use crate::common::tiny_model::{
    CONTEXT, EXPERTS, HEAD_DIM, HEADS, INNER, LAYERS, TOKENS, VOCAB, tiny_model,
};

const HIDDEN: u64 = 32;

fn options() -> Options {
    Options::default().threads(1)
}

fn open_with(file: &[u8], options: &Options) -> Result<Engine> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    std::fs::write(&path, file).unwrap();
    Engine::open(&path, options)
}

/// The refusal of a damaged file.
fn damaged(file: &GgufBuilder) -> String {
    match open_with(&file.build(), &options()) {
        Err(error @ Error::Format { .. }) => with_path(&error),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("the file was opened"),
    }
}

/// The refusal of a valid file with something unsupported.
fn unsupported(file: &GgufBuilder) -> String {
    match open_with(&file.build(), &options()) {
        Err(error @ Error::Unsupported(_)) => with_path(&error),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("the file was opened"),
    }
}

fn with_path(error: &Error) -> String {
    let message = error.to_string();
    assert!(message.contains("tiny.gguf"), "{message}");
    message
}

fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "no {part:?} in: {message}");
    }
}

/// The model with another value of one key.
fn with_count(key: &str, value: u32) -> GgufBuilder {
    let key = format!("qwen3moe.{key}");
    tiny_model(HIDDEN).without(&key).u32(&key, value)
}

#[test]
fn a_sound_model_runs() {
    let engine = open_with(&tiny_model(HIDDEN).build(), &options()).unwrap();
    assert_eq!(engine.vocab_size(), VOCAB as usize);
    assert_eq!(engine.context(), CONTEXT as usize);
    assert!(engine.template().unwrap().is_some());
    let prompt = engine.tokenizer().encode("abc a ab.", Default::default()).unwrap();
    let mut session = engine.session();
    let answer = session.generate(&Request::new(&engine, prompt).unwrap(), &mut |_| {}).unwrap();
    let tokens = session.tokens().to_vec();
    session.extend(&tokens).unwrap();
    assert!(session.logits().iter().all(|l| l.is_finite()));
    assert!(session.logits().iter().any(|&l| l != session.logits()[0]), "all logits are equal");
    assert!(answer.stats.prompt_tokens > 0);
}

#[test]
fn without_an_output_matrix_the_embedding_table_is_used() {
    let tied = open_with(&tiny_model(HIDDEN).without_tensor("output.weight").build(), &options()).unwrap();
    let untied = open_with(&tiny_model(HIDDEN).build(), &options()).unwrap();
    let [tied, untied] = [tied, untied].map(|engine| {
        let mut session = engine.session();
        session.extend(&[TokenId(1), TokenId(2)]).unwrap();
        session.logits().to_vec()
    });
    assert_ne!(tied, untied);
}

#[test]
fn a_type_that_cannot_be_computed_is_named_with_its_tensor() {
    let name = "blk.1.ffn_gate_inp.weight";
    let bytes = (HIDDEN * EXPERTS * 8) as usize;
    let file = tiny_model(HIDDEN).without_tensor(name);
    let message = unsupported(&file.tensor(name, tensor_type::F64, &[HIDDEN, EXPERTS], bytes));
    assert_says(&message, &[name, "F64", "Q4_K"]);

    let name = "blk.0.ffn_up_exps.weight";
    let dims = [256, INNER, EXPERTS];
    let bytes = (INNER * EXPERTS * 66) as usize;
    let file = tiny_model(256).without_tensor(name);
    let message = unsupported(&file.tensor(name, tensor_type::TQ2_0, &dims, bytes));
    assert_says(&message, &[name, "TQ2_0", "Q4_K", "IQ2_XXS"]);

    let name = "output_norm.weight";
    let file = tiny_model(HIDDEN).without_tensor(name);
    let message = unsupported(&file.tensor(name, tensor_type::Q8_0, &[HIDDEN], 34));
    assert_says(&message, &[name, "Q8_0", "F32, F16, BF16"]);
}

#[test]
fn a_missing_tensor_is_named() {
    for name in ["token_embd.weight", "blk.1.attn_k_norm.weight", "blk.0.ffn_down_exps.weight"] {
        assert_says(&damaged(&tiny_model(HIDDEN).without_tensor(name)), &[name, "missing"]);
    }
}

#[test]
fn a_wrong_shape_is_shown_beside_the_right_one() {
    let name = "blk.0.attn_output.weight";
    let file = tiny_model(HIDDEN).without_tensor(name);
    let message = damaged(&file.tensor(name, tensor_type::F32, &[8, HIDDEN], 8 * 4 * HIDDEN as usize));
    assert_says(&message, &[name, "[32, 8]", &format!("[{HIDDEN}, {}]", HEADS * HEAD_DIM)]);

    let name = "token_embd.weight";
    let file = tiny_model(HIDDEN).without_tensor(name);
    let message = damaged(&file.tensor(name, tensor_type::F32, &[HIDDEN], 4 * HIDDEN as usize));
    assert_says(&message, &[name, "[32]", "matrix"]);
}

#[test]
fn a_tensor_that_the_family_does_not_know_is_refused() {
    let name = "blk.0.attn_q.bias";
    let dims = [HEADS * HEAD_DIM];
    let message =
        unsupported(&tiny_model(HIDDEN).tensor(name, tensor_type::F32, &dims, 4 * dims[0] as usize));
    assert_says(&message, &[name]);
}

#[test]
fn an_unknown_architecture_is_named_beside_the_known_ones() {
    let key = "general.architecture";
    let message = unsupported(&tiny_model(HIDDEN).without(key).str(key, "mamba7"));
    assert_says(&message, &["mamba7", "qwen3moe"]);
    assert_says(&damaged(&tiny_model(HIDDEN).without(key)), &[key, "missing"]);

    let hostile = "\u{1b}[2J".repeat(10_000);
    let message = unsupported(&tiny_model(HIDDEN).without(key).str(key, &hostile));
    assert!(message.len() < 1000 && !message.contains('\u{1b}'), "{message:?}");
}

#[test]
fn invalid_counts_are_named() {
    for (key, value, expected) in [
        ("attention.head_count", 0, "is 0"),
        ("attention.head_count_kv", 3, "does not divide"),
        ("attention.head_count_kv", 0, "is 0"),
        ("attention.key_length", 7, "even"),
        ("attention.value_length", 0, "is 0"),
        ("embedding_length", 0, "is 0"),
        ("expert_count", 0, "is 0"),
        ("expert_used_count", 5, "larger than the number of experts"),
        ("expert_used_count", 0, "is 0"),
        ("expert_feed_forward_length", u32::MAX, "is 4294967295"),
        ("context_length", 0, "is 0"),
    ] {
        let message = damaged(&with_count(key, value));
        assert_says(&message, &[&format!("qwen3moe.{key} "), expected]);
    }
    for key in ["block_count", "attention.head_count", "attention.layer_norm_rms_epsilon", "context_length"] {
        let key = format!("qwen3moe.{key}");
        assert_says(&damaged(&tiny_model(HIDDEN).without(&key)), &[&key, "missing"]);
        assert_says(&damaged(&tiny_model(HIDDEN).without(&key).str(&key, "8")), &[&key, "is not"]);
    }
    assert_says(&damaged(&with_count("expert_count", 65_537)), &["65537 experts"]);
    for value in [0.0, -1e-6, f32::NAN, f32::INFINITY] {
        let key = "qwen3moe.attention.layer_norm_rms_epsilon";
        assert_says(&damaged(&tiny_model(HIDDEN).without(key).f32(key, value)), &[key, "positive number"]);
    }
}

#[test]
fn absurd_numbers_of_layers_are_refused() {
    let key = "qwen3moe.block_count";
    let absurd = tiny_model(HIDDEN).without(key);
    let message = damaged(&absurd.clone().raw(key, 10, (1u64 << 40).to_le_bytes()));
    assert_says(&message, &[key, "1099511627776"]);
    assert_says(&damaged(&absurd.clone().u32(key, 1 << 30)), &[key, "limit"]);
    assert_says(&damaged(&absurd.u32(key, 4096)), &["blk.2.", "missing"]);
}

#[test]
fn unknown_rotary_scaling_is_refused_by_name() {
    let opens = |file: &GgufBuilder| open_with(&file.build(), &options()).is_ok();
    let scaled = tiny_model(HIDDEN).f32("qwen3moe.rope.scaling.factor", 4.0);
    let typed = |name: &str| scaled.clone().str("qwen3moe.rope.scaling.type", name);
    assert_says(&unsupported(&typed("ntk")), &["qwen3moe.rope.scaling.type", "ntk"]);
    assert!(opens(&scaled) && ["none", "linear", "yarn"].iter().all(|name| opens(&typed(name))));
    let mixed = typed("yarn").f32("qwen3moe.rope.scaling.yarn_ext_factor", 0.5);
    assert_says(&unsupported(&mixed), &["yarn_ext_factor", "0.5"]);
    let without = tiny_model(HIDDEN).str("qwen3moe.rope.scaling.type", "yarn");
    assert_says(&damaged(&without), &["qwen3moe.rope.scaling.factor", "missing"]);

    let rotated = |channels| tiny_model(HIDDEN).u32("qwen3moe.rope.dimension_count", channels);
    assert_says(&unsupported(&rotated(4)), &["qwen3moe.rope.dimension_count", "4"]);
    assert!(open_with(&rotated(HEAD_DIM as u32).build(), &options()).is_ok());
}

/// Mistral-Large-3 is such a file: its architecture is supported, but not the temperature of its queries.
#[test]
fn settings_that_would_change_the_arithmetic_are_refused_by_name() {
    for key in ["attention.temperature_scale", "attention.temperature_length", "final_logit_softcapping"] {
        let key = format!("qwen3moe.{key}");
        let with = |value: f32| tiny_model(HIDDEN).f32(&key, value);
        assert_says(&unsupported(&with(0.1)), &[&key, "\"0.1\"", "not supported"]);
        assert_says(&unsupported(&tiny_model(HIDDEN).str(&key, "off")), &[&key, "\"off\""]);
        assert!(open_with(&with(0.0).build(), &options()).is_ok(), "zero means that {key} is off");
    }
}

/// GGUF files include layers for multi-token prediction in the number of layers.
#[test]
fn layers_for_multi_token_prediction_are_skipped() {
    let count = "qwen3moe.block_count";
    let file = tiny_model(HIDDEN).without(count).u32(count, LAYERS as u32 + 1);
    let further = |count| file.clone().u32("qwen3moe.nextn_predict_layers", count);
    let with =
        |layer| further(1).tensor(format!("blk.{layer}.nextn.enorm.weight"), tensor_type::F32, &[8], 32);
    assert!(open_with(&with(LAYERS).build(), &options()).is_ok());
    assert_says(&unsupported(&with(LAYERS + 1)), &["blk.3.nextn.enorm.weight", "unknown"]);
    assert_says(&damaged(&further(LAYERS as u32 + 1)), &["nextn_predict_layers", "no layers"]);
}

/// Converters also write layers for multi-token prediction to a separate file: `mtp-NAME.gguf`.
#[test]
fn drafts_for_speculative_decoding_are_refused_by_name() {
    let mut draft = tiny_model(HIDDEN).u32("qwen3moe.nextn_predict_layers", 1);
    for name in draft.names().iter().filter(|name| name.starts_with("blk.")) {
        let tensor = draft.take(name).unwrap();
        if name.starts_with("blk.1.") {
            draft = draft.tensor_of(name, tensor.tensor_type, &tensor.dims, tensor.data);
        }
    }
    let draft = draft.tensor("blk.1.nextn.eh_proj.weight", tensor_type::F32, &[64, 32], 64 * 32 * 4);
    assert_says(&unsupported(&draft), &["draft", "(MTP)", "use the GGUF file of the model"]);

    let key = "general.architecture";
    let other = tiny_model(HIDDEN).without(key).str(key, "eagle3");
    assert_says(&unsupported(&other), &["draft", "use the GGUF file of the model"]);
}

#[test]
fn projectors_of_images_and_audio_are_refused_by_name() {
    let key = "general.architecture";
    let clip = tiny_model(HIDDEN).without(key).str(key, "clip");
    let typed = tiny_model(HIDDEN).str("general.type", "mmproj");
    for file in [clip, typed] {
        assert_says(
            &unsupported(&file),
            &["vision or audio projector (mmproj)", "use the GGUF file of the model"],
        );
    }
}

/// NVFP4 files have scales next to their matrices: one, or one per expert.
#[test]
fn scales_that_do_not_fit_their_matrix_are_refused() {
    let file = tiny_model(HIDDEN);
    let with = |name: &str, kind: u32, count: u64, bytes: usize| {
        damaged(&file.clone().tensor(name, kind, &[count], bytes))
    };
    assert_says(
        &with("blk.0.attn_q.scale", tensor_type::F32, 2, 8),
        &["blk.0.attn_q.scale", "[2]", "needs 1"],
    );
    assert_says(&with("blk.0.attn_q.scale", tensor_type::BF16, 1, 2), &["blk.0.attn_q.scale", "BF16", "F32"]);
    let name = "blk.1.ffn_up_exps.scale";
    assert_says(&with(name, tensor_type::F32, 1, 4), &[name, "[1]", &format!("needs {EXPERTS}")]);
    // A scale without its matrix is an unknown tensor.
    let lonely = file.clone().tensor("blk.0.attn_norm.scale", tensor_type::F32, &[1], 4);
    assert_says(&unsupported(&lonely), &["blk.0.attn_norm.scale", "unknown"]);
}

#[test]
fn a_tokenizer_is_needed_and_must_fit_the_model() {
    let key = "tokenizer.ggml.model";
    assert_says(&damaged(&tiny_model(HIDDEN).without(key)), &[key, "missing"]);

    let mut tokens = TOKENS.to_vec();
    let more: Vec<String> = (TOKENS.len()..=VOCAB as usize).map(|i| format!("<{i}>")).collect();
    tokens.extend(more.iter().map(String::as_str));
    let key = "tokenizer.ggml.tokens";
    let file = tiny_model(HIDDEN).without("tokenizer.ggml.token_type").without(key).strings(key, &tokens);
    assert_says(&damaged(&file), &["17 tokens", "only 16"]);
}

#[test]
fn invalid_options_are_refused() {
    let file = tiny_model(HIDDEN).build();
    let refusal = |options: &Options| match open_with(&file, options) {
        Err(Error::Invalid(message)) => message,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("the options were accepted"),
    };
    let message = refusal(&options().context(97));
    assert_says(&message, &["97", &CONTEXT.to_string()]);
    assert_says(&refusal(&options().context(0)), &["use at least 1"]);
    assert_says(&refusal(&options().threads(0)), &["number of threads", "at least 1"]);
    assert_says(&refusal(&options().chunk(0)), &["chunk of 0"]);
    assert_says(&refusal(&options().chunk(usize::MAX)), &["chunk of 18446744073709551615"]);
}

#[test]
fn a_context_that_memory_cannot_hold_is_refused_with_both_numbers() {
    let file = with_count("context_length", 1 << 30);
    let engine = open_with(&file.build(), &options()).expect("memory is reserved for a short context");
    assert_eq!(engine.context(), 1 << 30);
    assert_eq!(engine.plan().reserved, 8192);
    // Two layers, two heads, eight channels each for keys and values, two bytes.
    let kv = (2 * 2 * 16 * 2) << 30;
    match open_with(&file.build(), &options().context(1 << 30)) {
        Err(error @ Error::Budget { need, have, .. }) => {
            assert!(need > have && need > kv);
            assert_says(&error.to_string(), &["context of 1073741824 tokens 128.0 GiB", "shorter context"]);
        }
        Err(other) => panic!("{other:?}"),
        // The machine may have that much memory, or not tell.
        Ok(engine) => {
            assert_eq!(engine.plan().kv, kv);
            assert!(Machine::now().available.is_none_or(|bytes| bytes > kv));
        }
    }
}

#[test]
fn a_file_that_ends_too_early_is_refused_at_once() {
    let file = tiny_model(HIDDEN).build();
    match open_with(&file[..file.len() - 1], &options()) {
        Err(error @ Error::Format { .. }) => assert_says(&with_path(&error), &["output.weight"]),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("the file was opened"),
    }
}
