//! Settings of `config.json` that change the arithmetic in some family are computed or refused by name in all of them.

use std::path::Path;

use forebay_engine::internals::format::{ModelFile, Value, folder};
use forebay_engine::internals::models::{Blueprint, describe};
use forebay_engine::{Error, Precision};
use forebay_testing::assert_same_bits;
use serde_json::{Map, Value as Json, json};

use crate::common::folder_builder::Folder;
use crate::common::models::{DENSE, MIXTURES, containers, logits, options, random_tokens};

/// Names in `config.json` of the families that transformers has, each with a value that changes the arithmetic there.
fn settings() -> Vec<(&'static str, Json)> {
    vec![
        ("attn_logit_softcapping", json!(50.0)),
        ("router_logit_softcapping", json!(30.0)),
        ("final_logit_softcapping", json!(30.0)),
        ("attention_multiplier", json!(0.07)),
        ("query_pre_attn_scalar", json!(256)),
        ("llama_4_scaling.beta", json!(0.1)),
        ("rope_parameters.llama_4_scaling_beta", json!(0.1)),
        ("rope_parameters.full_attention.rope_theta", json!(1e6)),
        ("rope_parameters.sliding_attention.rope_theta", json!(23_456.0)),
        ("rope_local_base_freq", json!(23_456.0)),
        ("attn_temperature_tuning", json!(true)),
        ("clip_qkv", json!(8.0)),
        ("use_sliding_window", json!(true)),
        ("attention_chunk_size", json!(8192)),
        ("use_bidirectional_attention", json!(true)),
        ("is_causal", json!(false)),
        ("index_topk", json!(2048)),
        ("num_kv_shared_layers", json!(2)),
        ("no_rope_layers", json!([1, 1, 1, 0])),
        ("no_rope_layer_interval", json!(4)),
        ("position_embedding_type", json!("nope")),
        ("attn_type_list", json!([0, 0, 0, 1])),
        ("layer_types", json!(["chunked_attention", "full_attention"])),
        ("mlp_only_layers", json!([0])),
        ("decoder_sparse_step", json!(2)),
        ("moe_layer_freq", json!(2)),
        ("swiglu_limits", json!([0.0, 7.0])),
        ("swiglu_limits_shared", json!([0.0, 7.0])),
        ("swiglu_limit", json!(0.01)),
        ("hidden_act", json!("gelu")),
        ("hidden_size_per_layer_input", json!(256)),
        ("use_parallel_residual", json!(true)),
        ("scoring_func", json!("sqrtsoftplus")),
        ("routed_scaling_factor", json!(3.5)),
        ("n_group", json!(3)),
        ("topk_group", json!(3)),
        ("logit_scale", json!(0.3)),
        ("logits_scaling", json!(8.0)),
        ("lm_head_multiplier", json!(0.1)),
        ("embedding_multiplier", json!(12.0)),
        ("residual_multiplier", json!(0.2)),
        ("hc_mult", json!(4)),
    ]
}

/// Settings that have no effect in these families, each with a reason.
const WITHOUT_EFFECT: &[(&str, &str, &str)] = &[
    ("glm4moe", "topk_group", "experts are not in groups"),
    ("dots1", "topk_group", "experts are not in groups"),
    ("bailingmoe", "n_group", "a token uses all groups"),
    ("deepseek_v2_lite", "llama_4_scaling.beta", "the context is not longer than that of the first training"),
    (
        "deepseek_v2_lite",
        "rope_parameters.llama_4_scaling_beta",
        "the context is not longer than that of the first training",
    ),
    ("mistral4", "llama_4_scaling.beta", "another name of this setting precedes it"),
    ("ministral3", "llama_4_scaling.beta", "another name of this setting precedes it"),
    (
        "step3p5",
        "rope_parameters.sliding_attention.rope_theta",
        "a list with a number for each layer precedes it",
    ),
    (
        "mimo_v2_flash",
        "rope_parameters.sliding_attention.rope_theta",
        "another name of this setting precedes it",
    ),
    ("smallthinker", "hidden_act", "the experts always have ReLU"),
    ("llama4", "attn_temperature_tuning", "it is true in the file, too"),
    ("llama4", "no_rope_layers", "it is the same in the file"),
    ("llama4", "no_rope_layer_interval", "a list with all layers precedes it"),
];

/// Sets a setting, whose name may be that of an object and that of a field in it.
fn set(config: &mut Map<String, Json>, name: &str, value: Json) {
    match name.split_once('.') {
        None => drop(config.insert(name.into(), value)),
        Some((object, field)) => {
            let inner = config.entry(object).or_insert_with(|| json!({}));
            set(inner.as_object_mut().expect("it is an object"), field, value);
        }
    }
}

#[test]
fn settings_of_other_families_are_computed_or_refused_by_name() {
    let temporary = tempfile::tempdir().unwrap();
    let mut silent = Vec::new();
    for family in MIXTURES.iter().chain(DENSE).copied() {
        let [_, path] = containers(family);
        let (folder, mut file) = (Folder::read(&path), ModelFile::open(&path).unwrap());
        let vocabulary = file.metadata.get("vocab_size").and_then(Value::as_u64).unwrap() as u32;
        // More than the contexts that some models were first trained on.
        let tokens = random_tokens(40, vocabulary, 1);
        let expected = logits(&path, &options(Precision::Exact), &tokens);
        for (name, value) in settings() {
            let mut folder = folder.clone();
            set(text(&mut folder), name, value);
            file.metadata = folder::config_metadata(&path, folder.config.clone()).unwrap();
            let acts = match describe(&file) {
                Err(error) => error.to_string().contains(name),
                Ok(_) => {
                    folder.write(temporary.path());
                    logits(temporary.path(), &options(Precision::Exact), &tokens) != expected
                }
            };
            if !acts && !WITHOUT_EFFECT.iter().any(|&(known, named, _)| known == family && named == name) {
                silent.push(format!("{family}: {name}"));
            }
        }
    }
    assert_eq!(silent, [""; 0]);
}

/// Where the families of transformers have different defaults, none is assumed.
#[test]
fn a_setting_whose_default_depends_on_the_family_may_not_be_missing() {
    for (family, name, missing) in [
        ("mixtral", "rope_theta", true),
        ("minimax_m2", "rope_theta", true),
        ("gpt_oss", "rope_theta", true),
        ("glm4moe", "partial_rotary_factor", true),
        ("llama", "rope_theta", false),
    ] {
        let [_, path] = containers(family);
        let (mut folder, mut file) = (Folder::read(&path), ModelFile::open(&path).unwrap());
        let nested = folder.config.get_mut("rope_parameters").and_then(Json::as_object_mut);
        let removed = nested.and_then(|nested| nested.remove(name));
        assert!(removed.or(folder.config.remove(name)).is_some(), "{family}");
        file.metadata = folder::config_metadata(&path, folder.config).unwrap();
        let error = describe(&file).err().map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(error.contains(&format!("{name} is missing")), missing, "{family}: {error}");
    }
}

#[test]
fn settings_that_no_published_model_has_are_refused_by_name() {
    for (family, name, value) in [
        ("step3p5", "yarn_only_types", json!(["sliding_attention"])),
        ("step3p5", "norm_expert_weight", json!(false)),
        ("step3p5", "moe_every_n_layer", json!(2)),
        ("mimo_v2_flash", "swa_num_attention_heads", json!(2)),
        ("mimo_v2_flash", "swa_head_dim", json!(32)),
        ("mimo_v2_flash", "swa_v_head_dim", json!(32)),
        ("mimo_v2_flash", "attention_chunk_size", json!(64)),
        ("laguna", "moe_router_logit_softcapping", json!(30.0)),
        ("laguna", "moe_apply_router_weight_on_input", json!(true)),
        ("laguna", "mlp_only_layers", json!([1, 0])),
        ("llama4", "num_experts_per_tok", json!(2)),
    ] {
        let error = describe_with(family, &|config| drop(config.insert(name.into(), value.clone())));
        let error = error.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains(name), "{family}, {name}: {error}");
    }
}

/// Transformers reads published settings and saves others.
#[test]
fn settings_of_transformers_mean_the_same_as_published_ones() {
    let rope = |base: f64, share: f64| json!({ "rope_type": "default", "rope_theta": base, "partial_rotary_factor": share });
    assert_same("step3p5", &|config| {
        let mut full = rope(50_000.0, 0.5);
        full.as_object_mut().unwrap().extend(config["rope_scaling"].as_object().unwrap().clone());
        for name in ["rope_scaling", "rope_theta", "partial_rotary_factors", "yarn_only_types"] {
            config.remove(name).unwrap();
        }
        let groups = json!({ "full_attention": full, "sliding_attention": rope(10_000.0, 1.0) });
        config.insert("rope_parameters".into(), groups);
        for (published, saved) in [
            ("num_attention_groups", "num_key_value_heads"),
            ("moe_num_experts", "n_routed_experts"),
            ("moe_top_k", "num_experts_per_tok"),
        ] {
            let value = config.remove(published).unwrap();
            config.insert(saved.into(), value);
        }
        let windowed = config.remove("attention_other_setting").unwrap();
        let own = json!({ "num_attention_heads": windowed["num_attention_heads"] });
        config.insert("per_layer_config".into(), json!({ "1": own, "3": own }));
        config.remove("moe_layers_enum").unwrap();
    });
    assert_same("mimo_v2_flash", &|config| {
        let groups = json!({ "full_attention": rope(5e6, 0.334), "sliding_attention": rope(1e4, 0.334) });
        config.insert("rope_parameters".into(), groups);
        for name in ["rope_theta", "swa_rope_theta", "partial_rotary_factor", "swa_num_key_value_heads"] {
            config.remove(name).unwrap();
        }
        config.remove("hybrid_layer_pattern").unwrap();
        config.remove("moe_layer_freq").unwrap();
    });
    // Those that transformers saves, removed.
    assert_same("mimo_v2_flash", &|config| {
        config.remove("layer_types").unwrap();
        config.remove("mlp_layer_types").unwrap();
    });
    assert_same("llama4", &|config| {
        config.remove("layer_types").unwrap();
        config.remove("moe_layers").unwrap();
        config.insert("no_rope_layers".into(), json!([]));
        config.insert("attn_temperature_tuning".into(), json!(4));
    });
}

/// The description of a family's tiny model after a change of its settings.
fn describe_with(family: &str, change: &dyn Fn(&mut Map<String, Json>)) -> Result<Blueprint, Error> {
    let [_, path] = containers(family);
    let (mut folder, mut file) = (Folder::read(&path), ModelFile::open(&path).unwrap());
    change(text(&mut folder));
    file.metadata = folder::config_metadata(&path, folder.config).unwrap();
    describe(&file)
}

/// Asserts that a change of a folder's settings changes nothing.
fn assert_same(family: &str, change: &dyn Fn(&mut Map<String, Json>)) {
    let [_, path] = containers(family);
    let mut folder = Folder::read(&path);
    change(text(&mut folder));
    let temporary = tempfile::tempdir().unwrap();
    folder.write(temporary.path());
    let tokens = random_tokens(48, 512, 1);
    let run = |path: &Path| logits(path, &options(Precision::Exact), &tokens);
    assert_same_bits(&run(temporary.path()), &run(&path), family);
}

/// The settings of a folder's text model.
fn text(folder: &mut Folder) -> &mut Map<String, Json> {
    match folder.config.contains_key("text_config") {
        true => folder.config["text_config"].as_object_mut().unwrap(),
        false => &mut folder.config,
    }
}
