//! Writes the initial inputs of the targets `tokenizer` and `tokenizer_json` into their corpora.

use std::fs;
use std::io;
use std::path::Path;

#[allow(dead_code)]
#[allow(dead_code, reason = "the engine's tests use the rest")]
#[path = "../../crates/engine/tests/common/gguf_builder.rs"]
mod gguf_builder;

use gguf_builder::GgufBuilder;

const TOKENS: [&str; 9] = ["<unk>", "<s>", "</s>", "a", "b", "Ġ", "ab", "▁", "<0x41>"];
const SCORES: [f32; 9] = [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0, 0.0];
const TYPES: [i32; 9] = [2, 3, 3, 1, 1, 1, 1, 4, 6];

// GGUF's identifiers of the types.
const I32: u32 = 5;
const F32: u32 = 6;

fn main() -> io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let folder = corpus.join("tokenizer");
    fs::create_dir_all(&folder)?;
    for (model, pre) in [("gpt2", "qwen2"), ("gpt2", "falcon"), ("gpt2", "kimi-k2"), ("llama", "default")] {
        let file = GgufBuilder::new()
            .str("tokenizer.ggml.model", model)
            .str("tokenizer.ggml.pre", pre)
            .strings("tokenizer.ggml.tokens", &TOKENS)
            .strings("tokenizer.ggml.merges", &["a b"])
            .array("tokenizer.ggml.scores", F32, 9, SCORES.map(f32::to_le_bytes).concat())
            .array("tokenizer.ggml.token_type", I32, 9, TYPES.map(i32::to_le_bytes).concat())
            .u32("tokenizer.ggml.bos_token_id", 1)
            .u32("tokenizer.ggml.unknown_token_id", 0)
            .str(
                "tokenizer.chat_template",
                "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
            );
        fs::write(folder.join(format!("{model}_{pre}")), file.build())?;
    }

    let folder = corpus.join("tokenizer_json");
    fs::create_dir_all(&folder)?;
    let vocab = r#"{"<s>":0,"a":1,"b":2,"Ġ":3,"ab":4,"▁":5,"<0x41>":6,"<unk>":7}"#;
    let added = r#"[{"id":0,"content":"<s>","lstrip":true,"rstrip":true,"normalized":true,"special":true}]"#;
    let byte_level = r#"{"type":"ByteLevel","add_prefix_space":false,"use_regex":true}"#;
    let split =
        r#"{"type":"Split","pattern":{"Regex":"\\p{N}{1,3}|\\s+(?!\\S)|\\s+"},"behavior":"Isolated"}"#;
    let documents = [
        (
            "NFC",
            format!(r#"{{"type":"Sequence","pretokenizers":[{split},{{"type":"Digits"}},{byte_level}]}}"#),
            byte_level,
        ),
        (
            "NFKC",
            r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"first"}"#.into(),
            r#"{"type":"Metaspace"}"#,
        ),
    ];
    for (form, pre, decoder) in documents {
        let file = format!(
            r#"{{"added_tokens":{added},"normalizer":{{"type":"{form}"}},"pre_tokenizer":{pre},"post_processor":{{"type":"TemplateProcessing","single":[{{"SpecialToken":{{"id":"<s>"}}}},{{"Sequence":{{"id":"A"}}}}],"special_tokens":{{"<s>":{{"ids":[0]}}}}}},"decoder":{decoder},"model":{{"type":"BPE","unk_token":"<unk>","fuse_unk":true,"byte_fallback":true,"ignore_merges":true,"vocab":{vocab},"merges":["a b",["a","b"]]}}}}"#
        );
        let config =
            r#"{"bos_token":"<s>","eos_token":{"content":"b"},"add_bos_token":true,"chat_template":"x"}"#;
        fs::write(folder.join(form), format!("{file}\0{config}"))?;
    }
    Ok(())
}
