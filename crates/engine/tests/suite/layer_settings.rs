//! Settings that differ between the layers of a model, in each spelling that files have.

use forebay_engine::internals::format::{Metadata, ModelFile, NumberArray, NumberKind, Value};
use forebay_engine::{Engine, Error, Precision, TokenId};
use forebay_testing::{assert_same_bits, golden};
use serde_json::json;

use crate::common::folder_builder::Folder;
use crate::common::gguf_builder::{GgufBuilder, tensor_type};
use crate::common::models::{Reference, data, logits, options};

/// The logits of a folder with changed settings, computed as exactly as possible.
fn changed(name: &str, tokens: &[TokenId], change: impl Fn(&mut Folder)) -> Vec<f32> {
    let temporary = tempfile::tempdir().unwrap();
    let mut folder = Folder::read(&golden(name));
    change(&mut folder);
    folder.write(temporary.path());
    logits(temporary.path(), &options(Precision::Exact), tokens)
}

fn tokens(name: &str) -> Vec<TokenId> {
    Reference::read(&format!("golden/{name}.logits.safetensors")).tokens
}

#[test]
fn sizes_of_layers_are_read_from_a_list_or_by_their_kind() {
    let tokens = tokens("gemma4");
    let by_kind = changed("gemma4", &tokens, |_| {});
    let by_layer = changed("gemma4", &tokens, |folder| {
        let text = folder.config["text_config"].as_object_mut().unwrap();
        let dim = text.remove("global_head_dim").unwrap();
        let kv_heads = text.remove("num_global_key_value_heads").unwrap();
        let own = json!({"head_dim": dim, "num_key_value_heads": kv_heads});
        text.insert("per_layer_config".into(), json!({"1": own, "3": own}));
    });
    assert_same_bits(&by_layer, &by_kind, "gemma4");
}

#[test]
fn rotations_of_layers_are_read_by_their_kind_or_from_separate_settings() {
    let tokens = tokens("gemma3");
    let separate = changed("gemma3", &tokens, |_| {});
    let by_kind = changed("gemma3", &tokens, |folder| {
        let config = &mut folder.config;
        let mut full = config.remove("rope_scaling").unwrap();
        full["rope_theta"] = config.remove("rope_theta").unwrap();
        let window =
            json!({"rope_type": "default", "rope_theta": config.remove("rope_local_base_freq").unwrap()});
        config.insert("rope_parameters".into(), json!({"full_attention": full, "sliding_attention": window}));
        config.remove("sliding_window_pattern").unwrap();
        let kinds = (1..=7).map(|l| if l == 6 { "full_attention" } else { "sliding_attention" });
        config.insert("layer_types".into(), kinds.collect());
    });
    assert_same_bits(&by_kind, &separate, "gemma3");
}

#[test]
fn the_distance_between_layers_without_a_window_may_be_a_number() {
    let tokens = tokens("gemma3");
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("model.gguf");
    for (period, folder_period) in [(2, 2), (6, 6)] {
        let file = GgufBuilder::copy_of(&data("golden/gemma3.gguf"));
        let file = file.u32("gemma3.attention.sliding_window_pattern", period);
        std::fs::write(&path, file.build()).unwrap();
        let folder = changed("gemma3", &tokens, |folder| {
            folder.config.insert("sliding_window_pattern".into(), json!(folder_period));
        });
        assert_same_bits(&logits(&path, &options(Precision::Exact), &tokens), &folder, "gemma3");
    }
}

/// GGUF files have the divisors of LongRoPE as tensors, and the wrong factor of cosine and sine.
#[test]
fn short_divisors_are_read_from_settings_or_from_a_tensor() {
    let tokens = tokens("phimoe-longrope");
    let short = [1.0f32, 1.0, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0];
    let folder = changed("phimoe-longrope", &tokens, |folder| {
        let rope = &mut folder.config["rope_scaling"];
        assert_eq!(rope["short_factor"], json!([1.0, 1.0, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0]));
        rope["short_mscale"] = json!(1.243_163_121_016_122);
    });
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("model.gguf");
    let bytes = |divisors: [f32; 8]| divisors.map(f32::to_le_bytes).concat();
    let file = GgufBuilder::copy_of(&data("golden/phimoe.gguf"))
        .f32("phimoe.rope.scaling.attn_factor", 1.19)
        .tensor_of("rope_factors_short.weight", tensor_type::F32, &[8], bytes(short))
        .tensor_of("rope_factors_long.weight", tensor_type::F32, &[8], bytes([12.0; 8]));
    // The original context of the copied model is as long as the whole one.
    let mut file = file.build();
    let key = b"phimoe.rope.scaling.original_context_length";
    let value = file.windows(key.len()).position(|bytes| bytes == key).unwrap() + key.len() + 4;
    assert_eq!(file[value..][..4], 256u32.to_le_bytes());
    file[value..][..4].copy_from_slice(&128u32.to_le_bytes());
    std::fs::write(&path, file).unwrap();
    // The frequencies are divided in f64 in one container, and in f32 in the other.
    let ours = logits(&path, &options(Precision::Exact), &tokens);
    assert!(forebay_testing::relative_error(&ours, &folder) < 1e-5);
    for model in [path, golden("phimoe-longrope")] {
        assert_eq!(
            Engine::open(&model, &options(Precision::Exact)).unwrap().context(),
            128,
            "{}",
            model.display()
        );
    }
}

#[test]
fn the_blocks_of_layers_are_words_or_letters() {
    let tokens = tokens("nemotron_h_moe");
    let letters = changed("nemotron_h_moe", &tokens, |_| {});
    let words = changed("nemotron_h_moe", &tokens, |folder| {
        folder.config.remove("hybrid_override_pattern").unwrap();
        let blocks = json!(["moe", "attention", "moe", "full_attention", "moe"]);
        folder.config.insert("layers_block_type".into(), blocks);
        folder.config.insert("num_hidden_layers".into(), json!(5));
    });
    assert_same_bits(&words, &letters, "nemotron_h_moe");
    let message = refusal("nemotron_h_moe", |folder| {
        folder.config.insert("num_hidden_layers".into(), json!(4));
    });
    assert!(message.contains("hybrid_override_pattern does not have one block for each layer"), "{message}");
}

#[test]
fn layers_of_mamba_are_refused_by_name_in_gguf_files() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("model.gguf");
    let name = "nemotron_h_moe.attention.head_count_kv";
    let whole = golden("nemotron_h_moe.gguf");
    let mut metadata = Metadata::default();
    for (key, value) in ModelFile::open(&whole).unwrap().metadata.iter() {
        // The second layer has neither attention nor a feed-forward block.
        let bytes = [0, 0, 0, 2, 0i32].into_iter().flat_map(i32::to_le_bytes).collect();
        let changed = Value::Numbers(NumberArray::new(NumberKind::I32, bytes));
        metadata.insert(key.into(), if key == name { changed } else { value.clone() }).unwrap();
    }
    std::fs::write(&path, GgufBuilder::copy_of(&whole).with_metadata(&metadata).build()).unwrap();
    let message = Engine::open(&path, &options(Precision::Exact)).err().unwrap().to_string();
    assert!(message.contains(name) && message.contains("Mamba2"), "{message}");
}

/// The refusal of a folder with changed settings.
fn refusal(name: &str, change: impl Fn(&mut Folder)) -> String {
    let temporary = tempfile::tempdir().unwrap();
    let mut folder = Folder::read(&golden(name));
    change(&mut folder);
    folder.write(temporary.path());
    match Engine::open(temporary.path(), &options(Precision::Exact)) {
        Err(error @ (Error::Unsupported(_) | Error::Format { .. })) => error.to_string(),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("{name} was opened"),
    }
}

#[test]
fn what_a_family_does_not_compute_is_refused_by_name() {
    let cases = [
        ("gemma4_dense", "hidden_size_per_layer_input", json!(256)),
        ("gemma4_dense", "num_kv_shared_layers", json!(2)),
        ("gemma4_dense", "use_bidirectional_attention", json!("all")),
        ("gemma4_dense", "attention_bias", json!(true)),
        ("gemma4_dense", "hidden_activation", json!("silu")),
        ("gemma3", "use_bidirectional_attention", json!(true)),
        ("gemma3", "attention_bias", json!(true)),
        ("gemma3", "attn_logit_softcapping", json!(50.0)),
        ("gemma3", "hidden_activation", json!("gelu")),
        ("cohere2_moe", "attention_bias", json!(true)),
        ("cohere2_moe", "expert_selection_fn", json!("sparsemax")),
        ("cohere2_moe", "shared_expert_combination_strategy", json!("product")),
        ("phimoe", "num_experts_per_tok", json!(3)),
        ("phimoe", "sliding_window", json!(17)),
        ("grovemoe", "norm_topk_prob", json!(false)),
        ("nemotron_h_moe", "hybrid_override_pattern", json!("EME*E")),
        ("nemotron_h_moe", "hybrid_override_pattern", json!("E-E*E")),
        ("nemotron_h_latent", "layers_block_type", json!(["moe", "mamba", "moe", "full_attention", "moe"])),
        ("nemotron_h_latent", "mlp_hidden_act", json!("silu")),
        ("nemotron_h_latent", "n_shared_experts", json!(2)),
        ("nemotron_h_latent", "mlp_bias", json!(true)),
    ];
    for (name, setting, value) in cases {
        let message = refusal(name, |folder| {
            folder.config.insert(setting.into(), value.clone());
        });
        assert!(message.contains(setting) && message.contains("is not supported"), "{message}");
    }
    let message = refusal("phimoe-longrope", |folder| {
        folder.config["rope_scaling"]["short_factor"] = json!([1.0, 2.0]);
    });
    assert!(message.contains("short_factor is not a list of 8 positive numbers"), "{message}");
}

#[test]
fn divisors_that_tell_which_channels_rotate_are_needed() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("model.gguf");
    let file = GgufBuilder::copy_of(&data("golden/gemma4.gguf")).without_tensor("rope_freqs.weight");
    std::fs::write(&path, file.build()).unwrap();
    let Err(error) = Engine::open(&path, &options(Precision::Exact)) else { panic!("it was opened") };
    assert!(error.to_string().contains("tensor rope_freqs.weight is missing"), "{error}");
}

/// EXAONE's files may say `LLLG`, or give no types of layers at all.
#[test]
fn the_distance_between_layers_without_a_window_may_be_a_word() {
    let tokens = tokens("exaone_moe");
    let typed = changed("exaone_moe", &tokens, |_| {});
    for period in [json!("LG"), json!(2)] {
        let spelled = changed("exaone_moe", &tokens, |folder| {
            folder.config.remove("layer_types").unwrap();
            folder.config.insert("sliding_window_pattern".into(), period.clone());
        });
        assert_same_bits(&spelled, &typed, &period.to_string());
    }
    let both = changed("exaone_moe", &tokens, |folder| {
        folder.config.insert("sliding_window_pattern".into(), json!("LLLG"));
    });
    assert_same_bits(&both, &typed, "types of layers precede");
}

/// Transformers saves no setting that has the family's own default.
#[test]
fn omitted_settings_of_the_rotation_have_the_defaults_of_the_family() {
    for (family, base) in
        [("hy_v3", 11_158_840.0), ("ernie4_5_moe", 5e5), ("qwen3_vl_moe", 5e5), ("solar_open", 1e6)]
    {
        let tokens = tokens(family);
        let with = |rotation: Option<serde_json::Value>| {
            changed(family, &tokens, |folder| {
                let is_nested = folder.config.contains_key("text_config");
                let config = match is_nested {
                    true => folder.config["text_config"].as_object_mut().unwrap(),
                    false => &mut folder.config,
                };
                for name in ["rope_theta", "partial_rotary_factor", "rope_scaling", "rope_parameters"] {
                    config.remove(name);
                }
                config.extend(rotation.clone().map(|rotation| ("rope_parameters".to_owned(), rotation)));
            })
        };
        let given = json!({"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 1.0});
        assert_same_bits(&with(None), &with(Some(given)), family);
    }
}
