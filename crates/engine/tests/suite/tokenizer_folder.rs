//! A Hugging Face folder and a GGUF file of the same model give the same tokens.

use std::path::Path;

use forebay_engine::chat::ChatTemplate;
use forebay_engine::internals::format::ModelFile;
use forebay_engine::tokenizer::{Bos, EncodeOptions, Tokenizer};
use forebay_engine::{Error, TokenId};
use forebay_testing::shared;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value as Json, json};

fn gguf(path: &Path) -> Tokenizer {
    Tokenizer::from_metadata(path, &ModelFile::open(path).unwrap().metadata).unwrap()
}

/// A text of what tokenizers treat specially: scripts, emoji, white space, digits, marks and special tokens.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        any::<String>(),
        "[ \\t\\r\\n]{0,6}",
        "[\u{a0}\u{3000}\u{2003}\u{85}\u{200b}\u{feff}\u{b} ]{1,3}",
        "[a-zA-Z']{0,8}",
        "[0-9]{0,7}",
        "[!-/:-@\\[-`{-~]{1,4}",
        "\\p{Cyrillic}{1,5}|\\p{Greek}{1,5}|\\p{Arabic}{1,5}|\\p{Hebrew}{1,5}",
        "\\p{Han}{1,4}|\\p{Hiragana}{1,4}|\\p{Katakana}{1,4}|\\p{Hangul}{1,4}",
        "\\p{Devanagari}{1,5}|\\p{Thai}{1,5}|\\p{Tamil}{1,5}|\\p{Khmer}{1,5}",
        "\\p{M}{1,2}|\\p{N}{1,3}|\\p{P}{1,3}|\\p{S}{1,3}|\\p{Lt}",
        prop::sample::select(vec![
            "<|im_end|>",
            "<|im_start|>",
            "<|endoftext|>",
            "<|im_",
            "👩‍🚀",
            "🇩🇪",
            "👍🏽",
            "1️⃣",
            "e\u{301}",
            "I'm",
            "WE'VE",
            "can't",
            "'\u{17f}",
            "\r\n\r\n",
            "   \n x",
        ])
        .prop_map(str::to_owned)
    ];
    prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
}

fn check_same_tokens(folder: &Tokenizer, gguf: &Tokenizer) {
    assert_eq!(folder.vocab_size(), gguf.vocab_size());
    for id in (0..folder.vocab_size() as u32).map(TokenId) {
        assert_eq!(folder.token_bytes(id), gguf.token_bytes(id), "{id:?}");
        assert_eq!(folder.is_control(id), gguf.is_control(id), "{id:?}");
    }
    let mut runner = TestRunner::new(Config { cases: 2000, ..Config::default() });
    let same = runner.run(&text(), |text| {
        for special in [false, true] {
            let options = EncodeOptions { special, bos: Bos::Never };
            let tokens = folder.encode(&text, options).unwrap();
            prop_assert_eq!(&tokens, &gguf.encode(&text, options).unwrap(), "special: {}", special);
            prop_assert_eq!(folder.decode(&tokens, special), &*text);
        }
        Ok(())
    });
    if let Err(e) = same {
        panic!("{e}");
    }
}

#[test]
fn trained_models_give_the_same_tokens_in_both_formats() {
    for (folder, file) in [
        ("tales-qwen3moe-mlx-4bit", "tales-qwen3moe-Q4_K_M.gguf"),
        ("tales-deepseek_v3", "tales-deepseek_v3-Q4_K_M.gguf"),
        ("tales-qwen35moe", "tales-qwen35moe-Q4_K_M.gguf"),
    ] {
        let (Some(folder), Some(file)) =
            (shared(&format!("models/{folder}")), shared(&format!("models/{file}")))
        else {
            return;
        };
        let (folder, file) = (Tokenizer::from_folder(&folder).unwrap(), gguf(&file));
        check_same_tokens(&folder, &file);
        assert_eq!(folder.eos(), file.eos());
        assert_eq!(folder.end_tokens(), file.end_tokens());
        assert_eq!(folder.adds_bos(), file.adds_bos());
    }
}

#[test]
fn gemma_4_gives_the_same_tokens_in_both_formats() {
    let (Some(folder), Some(file)) = (shared("golden2/gemma4"), shared("golden2/gemma4.gguf")) else {
        return;
    };
    check_same_tokens(&Tokenizer::from_folder(&folder).unwrap(), &gguf(&file));
}

#[test]
fn the_demo_model_gives_the_same_tokens_in_both_formats() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.join("tests/data/tales");
    let tokenizer = Tokenizer::from_folder(&folder).unwrap();
    check_same_tokens(&tokenizer, &gguf(&root.join("../../models/tales-qwen3moe-Q4_K_M.gguf")));
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(TokenId(4093)), Some(TokenId(4095))));
    assert_eq!(tokenizer.end_tokens(), [TokenId(4095)]);
    assert!(!tokenizer.adds_bos());
    assert!(ChatTemplate::from_folder(&folder).unwrap().is_some());
}

/// A folder's files, for a test to change.
struct Folder {
    tokenizer: Json,
    others: Vec<(&'static str, Json)>,
}

impl Folder {
    /// The bytes of `a`, `b` and space, one merge, and a control token.
    fn new() -> Folder {
        let tokenizer = json!({
            "added_tokens": [{"id": 4, "content": "<s>", "special": true}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
            "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3}, "merges": ["a b"]},
        });
        Folder { tokenizer, others: vec![] }
    }

    /// Sets a part of `tokenizer.json`.
    fn set(mut self, pointer: &str, value: Json) -> Folder {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        self.tokenizer.pointer_mut(parent).unwrap()[key] = value;
        self
    }

    fn file(mut self, name: &'static str, content: Json) -> Folder {
        self.others.push((name, content));
        self
    }

    fn open(&self) -> Result<Tokenizer, Error> {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, content: &Json| {
            std::fs::write(folder.path().join(name), serde_json::to_vec(content).unwrap()).unwrap();
        };
        write("tokenizer.json", &self.tokenizer);
        self.others.iter().for_each(|(name, content)| write(name, content));
        Tokenizer::from_folder(folder.path())
    }

    /// The error message for a damaged folder.
    fn refusal(&self) -> String {
        match self.open() {
            Err(e @ Error::Format { .. }) => e.to_string(),
            other => panic!("{other:?}"),
        }
    }

    /// The error message for an unsupported folder.
    fn unsupported(&self) -> String {
        match self.open() {
            Err(Error::Unsupported(message)) => message,
            other => panic!("{other:?}"),
        }
    }
}

fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    let options = EncodeOptions { special: true, bos: Bos::AsFileSays };
    tokenizer.encode(text, options).unwrap().iter().map(|id| id.0).collect()
}

#[test]
fn unsupported_settings_are_named() {
    for (pointer, value, name) in [
        ("/model/type", json!("Unigram"), "Unigram"),
        ("/model/dropout", json!(0.1), "dropout"),
        ("/model/end_of_word_suffix", json!("</w>"), "end_of_word_suffix"),
        ("/normalizer", json!({"type": "Lowercase"}), "Lowercase"),
        ("/pre_tokenizer", json!({"type": "BertPreTokenizer"}), "BertPreTokenizer"),
        ("/pre_tokenizer/add_prefix_space", json!(true), "add_prefix_space"),
        ("/pre_tokenizer", json!({"type": "Split", "behavior": "MergedWithNext"}), "MergedWithNext"),
        ("/decoder", json!({"type": "WordPiece"}), "WordPiece"),
        ("/decoder", Json::Null, "decoder"),
        ("/post_processor", json!({"type": "BertProcessing"}), "BertProcessing"),
        ("/added_tokens/0", json!({"id": 4, "content": "<s>", "single_word": true}), "single_word"),
    ] {
        let folder = match pointer.strip_prefix("/added_tokens/") {
            Some(_) => Folder::new().set("/added_tokens", json!([value])),
            None => Folder::new().set(pointer, value),
        };
        let message = folder.unsupported();
        assert!(message.contains(name) && message.contains("tokenizer.json"), "{pointer}: {message}");
    }
    let empty = tempfile::tempdir().unwrap();
    let error = Tokenizer::from_folder(empty.path()).unwrap_err();
    assert!(matches!(&error, Error::Unsupported(m) if m.contains("no tokenizer.json")), "{error}");
}

#[test]
fn damaged_settings_are_named() {
    for (pointer, value, part) in [
        ("/model", json!({"type": "BPE", "vocab": {"a": -1}, "merges": []}), "model"),
        ("/model", json!({"type": "BPE", "vocab": {"a": 4_000_000_000u32}, "merges": []}), "4000000000"),
        ("/model/merges", json!(["ab"]), "two tokens"),
        ("/model/merges", json!([["a", "b", "c"]]), "two tokens"),
        ("/model/unk_token", json!("?"), "unknown token"),
        ("/normalizer", json!({"kind": "NFC"}), "normalizer"),
        ("/pre_tokenizer", json!({"type": "Sequence"}), "pre_tokenizer"),
        ("/pre_tokenizer", json!({"type": "Split", "pattern": {}, "behavior": "Isolated"}), "pattern"),
        ("/post_processor", json!({"type": "TemplateProcessing"}), "post_processor"),
    ] {
        let message = Folder::new().set(pointer, value).refusal();
        assert!(message.contains(part), "{pointer}: {message}");
    }
    let bad_expression = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated"},
        {"type": "ByteLevel", "add_prefix_space": false}]});
    assert!(Folder::new().set("/pre_tokenizer", bad_expression).refusal().contains("`(a`"));
    for (name, content, part) in [
        ("tokenizer_config.json", json!([]), "tokenizer_config.json"),
        ("tokenizer_config.json", json!({"bos_token": "<t>"}), "<t>"),
        ("tokenizer_config.json", json!({"bos_token": {"content": 1}}), "bos_token"),
        ("tokenizer_config.json", json!({"add_bos_token": "yes"}), "add_bos_token"),
        ("tokenizer_config.json", json!({"add_bos_token": true}), "bos_token is missing"),
        ("generation_config.json", json!({"eos_token_id": [3, 5]}), "eos_token_id"),
        ("config.json", json!({"text_config": {"bos_token_id": -1}}), "bos_token_id"),
    ] {
        let message = Folder::new().file(name, content).refusal();
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn special_tokens_come_from_the_files_that_name_them() {
    let plain = Folder::new().open().unwrap();
    assert_eq!((plain.bos(), plain.eos(), plain.adds_bos()), (None, None, false));
    assert_eq!(tokens(&plain, "ab <s>"), [3, 2, 4]);

    let named = Folder::new()
        .file(
            "tokenizer_config.json",
            json!({"bos_token": {"content": "<s>"}, "eos_token": "b", "add_bos_token": true}),
        )
        .file("generation_config.json", json!({"eos_token_id": [0, 1], "bos_token_id": 2}))
        .file("config.json", json!({"eos_token_id": 3}));
    let named = named.open().unwrap();
    assert_eq!((named.bos(), named.eos()), (Some(TokenId(4)), Some(TokenId(1))));
    assert_eq!(named.end_tokens(), [TokenId(1), TokenId(0)]);
    assert_eq!(tokens(&named, "a"), [4, 0]);

    let template = json!({"type": "TemplateProcessing", "special_tokens": {"<s>": {"ids": [4]}, "x": {"ids": [2]}},
        "single": [{"SpecialToken": {"id": "x"}}, {"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]});
    let prefixed = Folder::new().set("/post_processor", template).open().unwrap();
    assert_eq!(tokens(&prefixed, "a"), [2, 4, 0]);
    assert!(prefixed.adds_bos());

    let nested =
        Folder::new().file("config.json", json!({"text_config": {"eos_token_id": [3]}})).open().unwrap();
    assert_eq!(nested.end_tokens(), [TokenId(3)]);
}

#[test]
fn a_token_that_looks_like_a_control_token_is_one() {
    let added =
        json!([{"id": 4, "content": "<|x|>"}, {"id": 5, "content": "<y>"}, {"id": 9, "content": "<｜z｜>"}]);
    let tokenizer = Folder::new().set("/added_tokens", added).open().unwrap();
    let control = [4, 5, 9].map(|id| tokenizer.is_control(TokenId(id)));
    assert_eq!(control, [true, false, true]);
    // Unused ids are tokens without text.
    assert_eq!((tokenizer.vocab_size(), tokenizer.token_bytes(TokenId(7))), (10, &b""[..]));
}
