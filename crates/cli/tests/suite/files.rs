//! `inspect`, `tokenize` and `logits`: what they tell about files, and what they write.

use std::path::Path;

use forebay_testing::relative_error;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::Value;

use crate::common::gguf_builder::{GgufBuilder, tensor_type};
use crate::common::{
    Outcome, call, call_with_input, demo_model, forebay, golden, shared_models, text, with_bos,
};

fn inspect_json(path: &str, more: &[&str]) -> Value {
    let args = [&["inspect", path, "--json"], more].concat();
    serde_json::from_str(&call(&args).success()).unwrap()
}

#[test]
fn inspect_tells_what_is_in_the_demo() {
    let text = call(&["inspect", &demo_model()]).success();
    for line in [
        "architecture   qwen3moe",
        "name           Tales qwen3moe",
        "parameters     27.8 M",
        "size           16.5 MiB",
        "layers         8",
        "experts        16",
        "experts used   4",
        "context        1024",
        "  tokenizer.ggml.tokens = 4096 strings",
        "  qwen3moe.attention.layer_norm_rms_epsilon = 1e-6",
    ] {
        assert!(text.lines().any(|l| l == line), "no line {line:?} in:\n{text}");
    }
    assert!(!text.contains("blk.0."), "{text}");
}

#[test]
fn inspect_lists_tensors_when_asked() {
    let text = call(&["inspect", &demo_model(), "--tensors"]).success();
    let line = text.lines().find(|l| l.trim_start().starts_with("blk.7.ffn_down_exps.weight")).unwrap();
    let words: Vec<_> = line.split_whitespace().collect();
    assert_eq!(words[1..], ["Q6_K", "[16,", "256,", "256]", "840.0", "KiB"]);
    let list = inspect_json(&demo_model(), &["--tensors"])["tensor_list"].as_array().unwrap().clone();
    assert_eq!(list.len(), 98);
    let tensor = list.iter().find(|t| t["name"] == "blk.7.ffn_down_exps.weight").unwrap();
    assert_eq!(tensor["type"], "Q6_K");
    assert_eq!(tensor["shape"], serde_json::json!([16, 256, 256]));
    assert_eq!(tensor["bytes"], 16 * 256 * 210);
}

#[test]
fn inspect_json_has_the_promised_shape() {
    let object = inspect_json(&demo_model(), &[]);
    let expected = serde_json::json!({
        "format": "gguf",
        "architecture": "qwen3moe",
        "name": "Tales qwen3moe",
        "parameters": 27_824_896,
        "bytes": std::fs::metadata(demo_model()).unwrap().len(),
        "tensors": 98,
        "layers": 8,
        "experts": 16,
        "experts_used": 4,
        "context": 1024,
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&object[key], value, "{key}");
    }
    let metadata = &object["metadata"];
    assert_eq!(metadata["qwen3moe.rope.freq_base"], 10000.0);
    assert_eq!(metadata["tokenizer.ggml.tokens"], serde_json::json!({ "array": "string", "length": 4096 }));
    assert_eq!(object.get("tensor_list"), None);
}

#[test]
fn inspect_works_on_vocabularies() {
    for path in shared_models("vocab") {
        let object = inspect_json(&text(&path), &["--tensors"]);
        assert_eq!((&object["tensors"], &object["parameters"]), (&0.into(), &0.into()), "{}", path.display());
        assert_eq!(object["bytes"], std::fs::metadata(&path).unwrap().len());
        assert!(object["architecture"].is_string() && object["experts"].is_null());
        assert!(call(&["inspect", &text(&path), "--tensors"]).success().contains("tensors        0\n"));
    }
}

#[test]
fn inspect_works_on_families_that_cannot_be_run() {
    for path in shared_models("golden") {
        let object = inspect_json(&text(&path), &["--tensors"]);
        let tensors = object["tensor_list"].as_array().unwrap();
        assert_eq!(object["tensors"], tensors.len(), "{}", path.display());
        assert!(object["layers"].as_u64().unwrap() > 0 && object["parameters"].as_u64().unwrap() > 10_000);
        assert!(call(&["inspect", &text(&path)]).success().contains("architecture"));
    }
}

#[test]
fn inspect_works_on_types_that_it_does_not_know() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("future.gguf");
    let file = GgufBuilder::new()
        .str("general.architecture", "qwen3moe")
        .tensor("token_embd.weight", tensor_type::F32, &[8, 4], 128)
        .tensor("blk.0.attn_q.weight", 142, &[8, 16], 77);
    std::fs::write(&path, file.build()).unwrap();
    let path = text(&path);
    let lines = call(&["inspect", &path, "--tensors"]).success();
    for line in [
        "parameters     160",
        "tensors        2",
        "unknown types  142 (tensors: 1; sizes unknown)",
        "  blk.0.attn_q.weight                      type 142 [16, 8]              unknown size",
    ] {
        assert!(lines.lines().any(|l| l == line), "no line {line:?} in:\n{lines}");
    }
    let object = inspect_json(&path, &["--tensors"]);
    let tensor = &object["tensor_list"][1];
    assert_eq!((&tensor["type"], &tensor["bytes"]), (&"type 142".into(), &Value::Null));
    let reason = object["cannot_run"].as_str().unwrap();
    assert!(reason.contains("blk.0.attn_q.weight") && reason.contains("142"), "{reason}");
    let refusal = call(&["run", &path, "-p", "Hi"]).failure(1);
    assert!(refusal.contains("blk.0.attn_q.weight") && refusal.contains("142"), "{refusal}");
}

#[test]
fn tokenize_prints_tokens_and_their_numbers() {
    let model = demo_model();
    let lines = call(&["tokenize", &model, "--text", "Hello <|im_end|>"]).success();
    let last = lines.lines().last().unwrap();
    assert_eq!(last.split_whitespace().collect::<Vec<_>>(), ["4095", "\"<|im_end|>\""]);
    let ids = call(&["tokenize", &model, "--text", "Hello <|im_end|>", "--ids"]).success();
    let numbers: Vec<&str> = lines.lines().map(|l| l.split_whitespace().next().unwrap()).collect();
    assert_eq!(ids, format!("[{}]\n", numbers.join(", ")));
    let plain = call(&["tokenize", &model, "--text", "Hello <|im_end|>", "--ids", "--no-special"]).success();
    assert!(!plain.contains("4095") && plain.len() > ids.len(), "{plain}");
    assert_eq!(call(&["tokenize", &model, "--text", "", "--ids"]).success(), "[]\n");
    assert!(call(&["tokenize", &model, "--text", "-a"]).success().contains('a'));
}

#[test]
fn tokenize_takes_a_text_a_file_or_standard_input() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text");
    let words = "Ein Märchen: 童话 🐈\n";
    std::fs::write(&file, words).unwrap();
    let model = demo_model();
    let expected = call(&["tokenize", &model, "--ids", "--text", words]).success();
    assert_eq!(call(&["tokenize", &model, "--ids", "--file", &text(&file)]).success(), expected);
    assert_eq!(call_with_input(&["tokenize", &model, "--ids"], words.as_bytes()).success(), expected);

    std::fs::write(&file, b"\xff").unwrap();
    let message = call(&["tokenize", &model, "--file", &text(&file)]).failure(1);
    assert!(message.starts_with(&format!("{} is not UTF-8 text", file.display())), "{message}");
    let message = call(&["tokenize", &model, "--file", "no/such/text"]).failure(1);
    assert!(message.starts_with("cannot read no/such/text: No such file"), "{message}");
}

/// The vectors were made without BOS and without control tokens.
#[test]
fn tokenize_agrees_with_the_vectors_of_other_programs() {
    let byte_level = ["ggml-vocab-gpt-2.gguf", "ggml-vocab-deepseek-llm.gguf"];
    for path in shared_models("vocab").iter().filter(|p| byte_level.iter().any(|name| p.ends_with(name))) {
        let beside = |end: &str| std::fs::read_to_string(format!("{}.{end}", path.display())).unwrap();
        let (inputs, outputs) = (beside("inp"), beside("out"));
        let (inputs, outputs) = (inputs.split("\n__ggml_vocab_test__\n"), outputs.lines());
        // The last separator ends the last text.
        assert_eq!(inputs.clone().count(), outputs.clone().count() + 1);
        let vectors = inputs.zip(outputs);
        // Some of them: the engine's own tests have them all.
        for (words, expected) in vectors.step_by(8) {
            let args = ["tokenize", &text(path), "--ids", "--no-bos", "--no-special"];
            let ids = call_with_input(&args, words.as_bytes()).success();
            let ids: Vec<u32> = serde_json::from_str(&ids).unwrap();
            let expected: Vec<u32> = expected.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(ids, expected, "{} on {words:?}", path.display());
        }
    }
}

#[test]
fn bos_is_added_where_the_file_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = text(&folder.path().join("bos.gguf"));
    std::fs::write(&path, with_bos(&std::fs::read(golden("qwen3moe.gguf")).unwrap())).unwrap();
    let ids = |more: &[&str]| {
        let text = call(&[&["tokenize", &path, "--text", "Hello", "--ids"], more].concat()).success();
        serde_json::from_str::<Vec<u32>>(&text).unwrap()
    };
    assert_eq!(ids(&[])[0], 509);
    assert_eq!(ids(&[])[1..], ids(&["--no-bos"]));
    let run = call(&["run", &path, "--raw", "-p", "Hello", "--json", "-n", "1"]).success();
    let run: Value = serde_json::from_str(&run).unwrap();
    assert_eq!(run["stats"]["prompt_tokens"], ids(&[]).len());
}

/// Tokens and logits of a file, whoever wrote it.
fn read_logits(path: &Path) -> (Vec<i32>, Vec<f32>, Vec<usize>) {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str, dtype: Dtype| -> Vec<[u8; 4]> {
        let tensor = file.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), dtype);
        tensor.data().chunks_exact(4).map(|b| b.try_into().unwrap()).collect()
    };
    let tokens = words("tokens", Dtype::I32).into_iter().map(i32::from_le_bytes).collect();
    let logits = words("logits", Dtype::F32).into_iter().map(f32::from_le_bytes).collect();
    (tokens, logits, file.tensor("logits").unwrap().shape().to_vec())
}

#[track_caller]
fn logits_agree(model: &str, reference: &str, flags: &[&str], tolerance: f64) {
    let (tokens, expected, shape) = read_logits(Path::new(&golden(reference)));
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("logits.safetensors");
    let ids: Vec<_> = tokens.iter().map(ToString::to_string).collect();
    let args = ["logits", model, "--tokens", &ids.join(","), "--out", &text(&out)];
    assert_eq!(call(&[&args, flags].concat()).success(), "");
    let (ours_tokens, ours, ours_shape) = read_logits(&out);
    assert_eq!((ours_tokens, ours_shape), (tokens, shape));
    let error = relative_error(&ours, &expected);
    assert!(error < tolerance, "relative error {error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn exact_logits_are_those_of_transformers() {
    logits_agree(&golden("qwen3moe.gguf"), "qwen3moe.logits.safetensors", &["--exact"], 1e-3);
    let reference = "tales-qwen3moe-Q4_K_M.f32.logits.safetensors";
    logits_agree(&demo_model(), reference, &["--exact"], 1e-3);
}

#[test]
fn fast_logits_are_close_to_those_of_llama_cpp() {
    logits_agree(&demo_model(), "tales-qwen3moe-Q4_K_M.llamacpp.logits.safetensors", &[], 3e-2);
}

#[test]
fn the_brackets_of_tokenize_are_understood() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    call(&["logits", &golden("qwen3moe.gguf"), "--tokens", "[1, 2, 3]\n", "--out", &text(&out)]).success();
    assert_eq!(read_logits(&out).0, [1, 2, 3]);
}

#[test]
fn logits_that_cannot_be_written_leave_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let model = golden("qwen3moe.gguf");
    let entries = || std::fs::read_dir(folder.path()).unwrap().count();

    let out = text(&folder.path().join("missing/out"));
    let message = call(&["logits", &model, "--tokens", "1", "--out", &out]).failure(1);
    assert!(message.starts_with(&format!("cannot write {out}: No such file")), "{message}");
    let out = text(folder.path());
    let message = call(&["logits", &model, "--tokens", "1", "--out", &out]).failure(1);
    assert!(message.starts_with(&format!("cannot write {out}: Is a directory")), "{message}");
    assert_eq!(entries(), 0);

    // A computation that fails leaves the file of an earlier one as it was.
    let out = folder.path().join("out");
    std::fs::write(&out, "earlier").unwrap();
    let message = call(&["logits", &model, "--tokens", "1,99999", "--out", &text(&out)]).failure(1);
    assert!(message.contains("token 99999 is not in the vocabulary of 512"), "{message}");
    assert_eq!((std::fs::read(&out).unwrap().as_slice(), entries()), (&b"earlier"[..], 1));
}

#[test]
fn a_path_that_cannot_be_written_is_found_before_the_model_is_opened() {
    let message =
        call(&["logits", "no/such/model", "--tokens", "1", "--out", "no/such/folder/out"]).failure(1);
    assert!(message.starts_with("cannot write no/such/folder/out"), "{message}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error() {
    for args in [["inspect", &demo_model(), "--json"], ["tokenize", &demo_model(), "--text=Hi"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let message = Outcome::from(forebay(args).stdout(full).output().unwrap()).failure(1);
        assert!(message.starts_with("cannot write to standard output: No space left"), "{message}");
    }
}
