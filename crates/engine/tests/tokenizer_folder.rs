//! A Hugging Face folder and a GGUF file of one model give the same tokens.

use std::path::{Path, PathBuf};

use forebay_engine::TokenId;
use forebay_engine::format::ModelFile;
use forebay_engine::tokenizer::{Bos, EncodeOptions, Tokenizer};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

fn shared(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared").join(name);
    if !path.exists() {
        eprintln!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

fn gguf(path: &Path) -> Tokenizer {
    Tokenizer::from_metadata(path, &ModelFile::open(path).unwrap().metadata).unwrap()
}

/// A text of what tokenizers care about: scripts, emoji, white space, digits, marks and special tokens.
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
fn trained_models_give_the_same_tokens_from_either_container() {
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
