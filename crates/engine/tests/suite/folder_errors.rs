//! Folders that cannot be run are refused with the name of what is missing, damaged or not supported.

use std::path::Path;

use forebay_engine::internals::format::{FileIdx, ModelFile, folder, safetensors};
use forebay_engine::{Error, Options, Prospect};
use serde_json::json;

use crate::common::folder_builder::{Folder, safetensors_file, safetensors_with_header};
use crate::common::models::data;

/// The refusal of the golden folder after a change.
fn refusal(name: &str, change: impl FnOnce(&mut Folder)) -> Error {
    let mut folder = Folder::read(&data(&format!("golden/{name}")));
    change(&mut folder);
    let temporary = tempfile::tempdir().unwrap();
    folder.write(temporary.path());
    match Prospect::new(temporary.path(), &Options::default()) {
        Err(error) => error,
        Ok(_) => panic!("it is accepted"),
    }
}

fn assert_damaged(error: &Error, words: &[&str]) {
    assert!(matches!(error, Error::Format { .. }), "{error}");
    assert_says(error, words);
}

fn assert_unsupported(error: &Error, words: &[&str]) {
    assert!(matches!(error, Error::Unsupported(_)), "{error}");
    assert_says(error, words);
}

fn assert_says(error: &Error, words: &[&str]) {
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
}

#[test]
fn other_quantisation_schemes_are_refused_by_name() {
    for method in ["gptq", "awq", "compressed-tensors", "bitsandbytes", "aqlm", "modelopt"] {
        let error = refusal("qwen3moe", |f| {
            f.config.insert("quantization_config".into(), json!({ "quant_method": method, "bits": 4 }));
        });
        assert_unsupported(&error, &["config.json", method, "FP8"]);
    }
    let error = refusal("qwen3moe", |f| {
        f.config.insert("quantization_config".into(), json!({ "quant_method": "fp8" }));
    });
    assert_unsupported(&error, &["weight_block_size"]);
}

#[test]
fn other_modes_of_mlx_are_refused_by_name() {
    for mode in ["mxfp4", "nvfp4", "mxfp8"] {
        let error = refusal("qwen3moe", |f| {
            f.config.insert("quantization".into(), json!({ "group_size": 32, "bits": 4, "mode": mode }));
            let weight = f.tensor("model.layers.0.self_attn.q_proj.weight");
            (weight.dtype, weight.shape) = ("U32".into(), vec![128, 32]);
            for plane in ["scales", "biases"] {
                f.add(format!("model.layers.0.self_attn.q_proj.{plane}"), "BF16", &[128, 2], vec![0; 512]);
            }
        });
        assert_unsupported(&error, &["q_proj", mode]);
    }
}

#[test]
fn planes_that_do_not_fit_are_refused() {
    const NAME: &str = "model.layers.1.self_attn.k_proj.weight";
    let scale = format!("{NAME}_scale_inv");
    assert_damaged(
        &refusal("qwen3moe-fp8", |f| drop(f.take(&scale))),
        &["k_proj.weight", "scale_inv is missing"],
    );
    let error = refusal("qwen3moe-fp8", |f| f.tensor(&scale).shape.reverse());
    assert_damaged(&error, &["k_proj.weight", "24×40"]);
    let error = refusal("qwen3moe-fp8", |f| {
        f.config["quantization_config"]["weight_block_size"] = json!([0, 40]);
    });
    assert_unsupported(&error, &["0×40"]);
    let error = refusal("qwen3moe-fp8", |f| {
        f.config["quantization_config"]["weight_block_size"] = json!("24");
    });
    assert_damaged(&error, &["weight_block_size"]);
    let words = |f: &mut Folder| {
        let weight = f.tensor(NAME);
        (weight.dtype, weight.shape) = ("U32".into(), vec![64, 32]);
    };
    assert_damaged(&refusal("qwen3moe", words), &["k_proj.weight", "k_proj.scales is missing"]);
    let affine = |bits: u64, group: u64| {
        refusal("qwen3moe", |f| {
            words(f);
            for plane in ["scales", "biases"] {
                f.add(format!("model.layers.1.self_attn.k_proj.{plane}"), "BF16", &[64, 1], vec![0; 128]);
            }
            f.config.insert("quantization".into(), json!({ "bits": bits, "group_size": group }));
        })
    };
    assert_damaged(&affine(4, 64), &["k_proj", "do not fit 4 bits in groups of 64"]);
    assert_unsupported(&affine(7, 64), &["7-bit"]);
    assert_unsupported(&affine(4, 1 << 62), &["groups of 4611686018427387904"]);
}

#[test]
fn a_tensor_that_is_missing_wrong_or_unknown_is_named() {
    let error = refusal("qwen3moe", |f| drop(f.take("model.layers.2.mlp.experts.5.up_proj.weight")));
    assert_damaged(&error, &["model.layers.2.mlp.experts.5.up_proj.weight is missing"]);
    let error = refusal("qwen3moe", |f| drop(f.take("lm_head.weight")));
    assert_damaged(&error, &["lm_head.weight is missing"]);
    let error =
        refusal("qwen3moe", |f| f.tensor("model.layers.0.mlp.experts.3.down_proj.weight").shape.reverse());
    assert_damaged(&error, &["experts.3.down_proj.weight", "[32, 64]", "[64, 32]"]);
    let error =
        refusal("qwen3moe", |f| f.add("model.layers.0.self_attn.q_proj.bias", "BF16", &[1], vec![0; 2]));
    assert_unsupported(&error, &["q_proj.bias", "unknown"]);
    let error = refusal("qwen3moe", |f| f.add("vision_tower.norm.weight", "F32", &[1], vec![0; 4]));
    assert_unsupported(&error, &["vision_tower.norm.weight", "unknown"]);
    for unknown in ["model.language_model.layers.0.self_attn.q_proj.bias", "model.language_model.gate.weight"]
    {
        let error = refusal("qwen3moe", |f| {
            f.rename(|name| name.replace("model.", "model.language_model."));
            f.add("model.visual.norm.weight", "F32", &[1], vec![0; 4]);
            f.add(unknown, "F32", &[1], vec![0; 4]);
        });
        assert_unsupported(&error, &[unknown, "unknown"]);
    }
    let error = refusal("qwen3moe", |f| {
        let weight = f.tensor("model.layers.0.mlp.experts.3.down_proj.weight");
        weight.dtype = "F16".into();
    });
    assert_damaged(&error, &["experts.3.down_proj.weight is F16", "BF16"]);
    let error = refusal("qwen3moe", |f| f.tensor("model.norm.weight").dtype = "I16".into());
    assert_unsupported(&error, &["model.norm.weight", "I16"]);
    // A layer that the settings do not count would be ignored.
    let error = refusal("qwen3moe", |f| drop(f.config.insert("num_hidden_layers".into(), json!(2))));
    assert_unsupported(&error, &["model.layers.2"]);
}

#[test]
fn invalid_settings_are_named() {
    for (key, value, word) in [
        ("num_attention_heads", json!(0), "between"),
        ("num_attention_heads", json!("four"), "positive integer"),
        ("num_experts_per_tok", json!(9), "larger"),
        ("num_key_value_heads", json!(3), "divide"),
        ("hidden_size", json!(null), "missing"),
        ("rms_norm_eps", json!(-1.0), "positive number"),
        ("hidden_size", json!(1u64 << 40), "between"),
    ] {
        let error = refusal("qwen3moe", |f| drop(f.config.insert(key.into(), value)));
        assert_damaged(&error, &["config.json", key, word]);
    }
    for (key, value, word) in [
        ("hidden_act", json!("gelu"), "gelu"),
        ("use_sliding_window", json!(true), "true"),
        ("rope_parameters", json!({ "rope_type": "dynamic", "rope_theta": 1e6 }), "dynamic"),
        ("rope_parameters", json!({ "factor": 4.0, "rope_theta": 1e6 }), "4"),
        ("partial_rotary_factor", json!(0.5), "0.5"),
        ("architectures", json!(["NewForCausalLM"]), "NewForCausalLM"),
    ] {
        let error = refusal("qwen3moe", |f| {
            f.config.remove("model_type");
            f.config.insert(key.into(), value);
        });
        assert_unsupported(&error, &[word]);
    }
    for (rope, problem) in [
        (json!({ "rope_type": "yarn" }), "factor is missing"),
        (json!({ "rope_type": "yarn", "factor": 0 }), "factor is not a positive number"),
        (
            json!({ "rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 1 }),
            "high_freq_factor is not above",
        ),
    ] {
        let error = refusal("qwen3moe", |f| drop(f.config.insert("rope_parameters".into(), rope)));
        assert_damaged(&error, &[problem]);
    }
    let error = refusal("qwen3moe", |f| f.config.clear());
    assert_damaged(&error, &["architectures is missing"]);
}

#[test]
fn invalid_settings_of_windows_and_experts_with_biases_are_named() {
    let types = |name: &str| json!(["full_attention", name, "full_attention", "full_attention"]);
    for (key, value, word) in [
        ("sliding_window", json!(null), "missing"),
        ("sliding_window", json!(0), "between"),
        ("layer_types", json!(["full_attention"]), "one type for each layer"),
        ("layer_types", json!(7), "not a list of strings"),
        ("swiglu_limit", json!(-7.0), "positive number"),
    ] {
        let error = refusal("gpt_oss", |f| drop(f.config.insert(key.into(), value)));
        assert_damaged(&error, &["config.json", key, word]);
    }
    let error = refusal("gpt_oss", |f| drop(f.config.insert("layer_types".into(), types("chunked"))));
    assert_unsupported(&error, &["layer_types", "chunked"]);
    for name in ["mlp.experts.down_proj_bias", "self_attn.sinks", "mlp.router.bias"] {
        let name = format!("model.layers.1.{name}");
        assert_damaged(&refusal("gpt_oss", |f| drop(f.take(&name))), &[&name, "missing"]);
        let error = refusal("gpt_oss", |f| f.tensor(&name).shape.push(1));
        assert_damaged(&error, &[&name, "shape"]);
    }
}

#[test]
fn invalid_settings_of_latent_attention_and_groups_are_named() {
    for (key, value, word) in [
        ("kv_lora_rank", json!(null), "missing"),
        ("kv_lora_rank", json!(0), "between"),
        ("q_lora_rank", json!(-1), "positive integer"),
        ("qk_rope_head_dim", json!(7), "even"),
        ("qk_nope_head_dim", json!(null), "missing"),
        ("v_head_dim", json!(0), "between"),
        ("n_group", json!(3), "does not divide"),
        ("topk_group", json!(5), "larger than the number of groups"),
        ("num_experts_per_tok", json!(9), "fewer experts"),
        ("routed_scaling_factor", json!(0), "positive number"),
    ] {
        let message = if key == "num_experts_per_tok" { "topk_group" } else { key };
        let error = refusal("deepseek_v3", |f| drop(f.config.insert(key.into(), value)));
        assert_damaged(&error, &["config.json", message, word]);
    }
    for (key, value, word) in [
        ("topk_method", json!("best"), "best"),
        ("scoring_func", json!("tanh"), "tanh"),
        ("attention_bias", json!(true), "true"),
        ("moe_layer_freq", json!(2), "2"),
        ("mlp_layer_types", json!(["dense", "sparse", "dense"]), "dense"),
    ] {
        let error = refusal("deepseek_v3", |f| drop(f.config.insert(key.into(), value)));
        assert_unsupported(&error, &[key, word]);
    }
    let error = refusal("deepseek_v2_lite", |f| drop(f.config.insert("norm_topk_prob".into(), json!(true))));
    assert_unsupported(&error, &["norm_topk_prob"]);
    let error = refusal("deepseek_v3", |f| drop(f.take("model.layers.1.self_attn.kv_b_proj.weight")));
    assert_damaged(&error, &["kv_b_proj.weight is missing"]);

    let error = refusal("deepseek_v3", |f| {
        let scheme = json!({ "quant_method": "fp8", "weight_block_size": [24, 64] });
        f.config.insert("quantization_config".into(), scheme);
        let name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight";
        f.take(name);
        f.add(name, "F8_E4M3", &[40, 64], vec![0; 40 * 64]);
        f.add(format!("{name}_scale_inv"), "F32", &[2, 1], vec![0; 8]);
    });
    assert_damaged(&error, &["kv_a_proj_with_mqa.weight", "share scales"]);
}

#[test]
fn files_that_are_missing_are_named() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path();
    let open = || ModelFile::open(path).map(drop).unwrap_err();
    assert_damaged(&open(), &["no config.json"]);
    std::fs::write(path.join("model-Q4.gguf"), "GGUF").unwrap();
    assert_damaged(&open(), &["GGUF files: name one"]);
    std::fs::remove_file(path.join("model-Q4.gguf")).unwrap();
    std::fs::write(path.join("config.json"), "{}").unwrap();
    assert_damaged(&open(), &["no safetensors files"]);
    std::fs::write(path.join("a.safetensors"), "").unwrap();
    std::fs::write(path.join("b.safetensors"), "").unwrap();
    assert_damaged(&open(), &["several safetensors files"]);
    let index = json!({ "weight_map": { "x": "model-00001-of-00001.safetensors" } });
    std::fs::write(path.join("model.safetensors.index.json"), index.to_string()).unwrap();
    let error = open();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    assert_says(&error, &["model-00001-of-00001.safetensors", "a part of the model"]);
    let error = ModelFile::open(&path.join("a.safetensors")).map(drop).unwrap_err();
    assert_damaged(&error, &["not part of the model"]);
    let error = ModelFile::open(&path.join("c.safetensors")).map(drop).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    std::fs::write(path.join("config.json"), "{").unwrap();
    assert_damaged(&open(), &["config.json", "not a JSON object"]);
}

#[test]
fn an_index_cannot_lead_out_of_its_folder() {
    let parse = |text: &str| folder::parse_index(Path::new("index.json"), text.as_bytes());
    for name in ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "", ".."] {
        let error = parse(&json!({ "weight_map": { "x": name } }).to_string()).unwrap_err();
        assert_damaged(&error, &["not a file of its folder"]);
    }
    assert_damaged(&parse(r#"{"weight_map": {}}"#).unwrap_err(), &["no files"]);
    assert_damaged(&parse(r#"{"weight_map": {"x": 1}}"#).unwrap_err(), &["not an index"]);
    assert_damaged(&parse("{}").unwrap_err(), &["not an index", "weight_map"]);
}

#[test]
fn damaged_safetensors_headers_each_have_their_error() {
    let parse = |bytes: &[u8], len: usize| {
        let path = Path::new("x.safetensors");
        safetensors::parse(path, &mut &*bytes, len as u64, FileIdx(0)).map(drop).unwrap_err()
    };
    let header = |text: &str, data: usize| {
        let bytes = safetensors_with_header(text);
        parse(&bytes, bytes.len() + data)
    };
    let tensor = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#""t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    let one = |dtype: &str, shape: &str, offsets: &str| {
        header(&format!("{{{}}}", tensor(dtype, shape, offsets)), 8)
    };
    assert_damaged(&parse(b"abc", 3), &["only 3 bytes"]);
    assert_damaged(&parse(&u64::MAX.to_le_bytes(), 1 << 20), &["18446744073709551615 bytes"]);
    assert_damaged(&parse(&1000u64.to_le_bytes(), 100), &["incomplete", "1000"]);
    assert_damaged(&parse(&10u64.to_le_bytes(), 100), &["ends in its header"]);
    assert_damaged(&header("[]", 0), &["an object of tensors"]);
    assert_damaged(&header("{\"a\":", 0), &["the header is not valid"]);
    assert_damaged(&header("{\"a\":{\"dtype\":\"F32\"}}", 0), &["shape"]);
    assert_unsupported(&one("F7", "[2]", "[0,8]"), &["\"t\"", "F7"]);
    // A block type of GGUF does not exist in this format.
    assert_unsupported(&one("Q4_K", "[2]", "[0,8]"), &["Q4_K"]);
    assert_damaged(&one("F32", "[2]", "[8,0]"), &["before its start"]);
    assert_damaged(&one("F32", "[3]", "[0,8]"), &["has 8 bytes", "12"]);
    assert_damaged(&one("F32", "[4]", "[0,16]"), &["incomplete", "16", "8"]);
    assert_damaged(&one("F32", "[1]", "[4,8]"), &["4 bytes before tensor"]);
    assert_damaged(&one("F32", "[1]", "[0,4]"), &["4 bytes at the end"]);
    assert_damaged(&one("F32", "[18446744073709551615, 2]", "[0,8]"), &["can be counted"]);
    assert_damaged(&one("F32", "[1,1,1,1,1,1,1,1,2]", "[0,8]"), &["9 dimensions"]);
    assert_damaged(&one("F32", "[-2]", "[0,8]"), &["the header is not valid"]);
    let two = format!(
        "{{{},{}}}",
        tensor("F32", "[2]", "[0,8]"),
        tensor("F32", "[1]", "[4,8]").replace("\"t\"", "\"u\"")
    );
    assert_damaged(&header(&two, 8), &["overlap"]);
}

#[test]
fn a_duplicate_name_is_refused() {
    let folder = Folder::read(&data("golden/qwen3moe"));
    let temporary = tempfile::tempdir().unwrap();
    folder.write_sharded(temporary.path(), 2);
    let again = folder.tensors[0].clone();
    let second: Vec<_> = folder.tensors.iter().skip(1).step_by(2).cloned().chain([again]).collect();
    let path = temporary.path().join("model-00002-of-00002.safetensors");
    std::fs::write(path, safetensors_file(&second)).unwrap();
    let error = ModelFile::open(temporary.path()).map(drop).unwrap_err();
    assert_damaged(&error, &["model-00002-of-00002", "is also in", "model-00001-of-00002"]);
}
