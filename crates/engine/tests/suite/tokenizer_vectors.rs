//! Tokenizers of real models give the tokens that the models were trained with.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_engine::TokenId;
use forebay_engine::internals::format::ModelFile;
use forebay_engine::tokenizer::{Bos, EncodeOptions, StreamDecoder, Tokenizer};
use forebay_testing::shared;
use proptest::prelude::*;

const PLAIN: EncodeOptions = EncodeOptions { special: false, bos: Bos::Never };
const SPECIAL: EncodeOptions = EncodeOptions { special: true, bos: Bos::Never };

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn open(path: &Path) -> Tokenizer {
    let file = ModelFile::open(path).unwrap();
    Tokenizer::from_metadata(path, &file.metadata).unwrap()
}

fn tales() -> Tokenizer {
    open(&repository().join("models/tales-qwen3moe-Q4_K_M.gguf"))
}

fn encode(tokenizer: &Tokenizer, text: &str, options: EncodeOptions) -> Vec<u32> {
    tokenizer.encode(text, options).unwrap().iter().map(|id| id.0).collect()
}

/// Checks a vocabulary of `../shared/vocab` against its vectors, if they are present.
fn check_shared_vectors(name: &str) {
    let Some(path) = shared(&format!("vocab/ggml-vocab-{name}.gguf")) else { return };
    let tokenizer = open(&path);
    let read = |extension: &str| std::fs::read_to_string(path.with_extension(extension)).unwrap();
    let texts = read("gguf.inp");
    let texts: Vec<_> = texts.split("\n__ggml_vocab_test__\n").collect();
    let ids = read("gguf.out");
    let ids: Vec<Vec<u32>> =
        ids.lines().map(|line| line.split_whitespace().map(|id| id.parse().unwrap()).collect()).collect();
    // The last separator ends the last text.
    assert_eq!(texts.len(), ids.len() + 1);
    for (text, ids) in texts.iter().zip(&ids) {
        assert_eq!(encode(&tokenizer, text, PLAIN), *ids, "{text:?}");
        let tokens: Vec<_> = ids.iter().copied().map(TokenId).collect();
        assert_eq!(tokenizer.decode(&tokens, false), *text);
    }
}

#[test]
fn gpt_2_matches_its_vectors() {
    check_shared_vectors("gpt-2");
}

#[test]
fn deepseek_llm_matches_its_vectors() {
    check_shared_vectors("deepseek-llm");
}

#[test]
fn falcon_matches_its_vectors() {
    check_shared_vectors("falcon");
}

#[test]
fn llama_spm_matches_its_vectors() {
    check_shared_vectors("llama-spm");
}

#[derive(serde::Deserialize)]
struct Vector {
    text: String,
    special: bool,
    ids: Vec<u32>,
}

#[test]
fn the_demo_model_tokenises_as_it_was_trained() {
    let vectors: Vec<Vector> = serde_json::from_str(include_str!("../data/tokenizer_tales.json")).unwrap();
    assert!(vectors.len() > 400);
    let tokenizer = tales();
    for v in vectors {
        let options = EncodeOptions { special: v.special, bos: Bos::Never };
        assert_eq!(encode(&tokenizer, &v.text, options), v.ids, "{:?}, special: {}", v.text, v.special);
        let tokens: Vec<_> = v.ids.iter().copied().map(TokenId).collect();
        assert_eq!(tokenizer.decode(&tokens, true), v.text);
    }
}

#[test]
fn the_demo_model_knows_its_special_tokens() {
    let tokenizer = tales();
    assert_eq!(tokenizer.vocab_size(), 4096);
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(TokenId(4093)), Some(TokenId(4095))));
    assert_eq!(tokenizer.end_tokens(), [TokenId(4095)]);
    assert!(!tokenizer.adds_bos());
    assert_eq!(tokenizer.find("<|im_start|>"), Some(TokenId(4094)));
    assert!(tokenizer.is_control(TokenId(4094)) && !tokenizer.is_control(TokenId(0)));
    assert_eq!(tokenizer.token_text(TokenId(4094)), "<|im_start|>");
    let the = tokenizer.find(" the").unwrap();
    assert_eq!(tokenizer.token_bytes(the), b" the");
    assert_eq!(tokenizer.find("Ġthe"), None);
    assert_eq!(tokenizer.token_bytes(TokenId(u32::MAX)), b"");
}

#[test]
fn a_run_of_a_megabyte_is_tokenised_in_full_and_in_time() {
    let tokenizer = tales();
    for unit in ["a", " ", "7", "\n", "ha", " a", "!", "é"] {
        let text = unit.repeat((1 << 20) / unit.len()) + " end";
        let start = Instant::now();
        let tokens = tokenizer.encode(&text, PLAIN).unwrap();
        assert!(start.elapsed() < Duration::from_secs(60), "{unit:?} took {:?}", start.elapsed());
        assert_eq!(tokenizer.decode(&tokens, false), text);
        assert_eq!(encode(&tokenizer, " end", PLAIN), [tokens.last().unwrap().0], "{unit:?}");
    }
}

proptest! {
    // A tokenizer takes a while to build, so each test builds one and draws all its texts inside.
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn decoding_restores_the_text(texts in prop::collection::vec(text(), 100)) {
        let tokenizer = tales();
        for text in texts {
            for options in [PLAIN, SPECIAL] {
                let tokens = tokenizer.encode(&text, options).unwrap();
                prop_assert_eq!(tokenizer.decode(&tokens, options.special), &*text);
            }
        }
    }

    #[test]
    fn streaming_gives_what_decoding_the_bytes_at_once_gives(
        runs in prop::collection::vec(prop::collection::vec(token(), 0..40), 100),
        special in any::<bool>(),
    ) {
        let tokenizer = tales();
        for tokens in runs {
            let mut decoder = StreamDecoder::new(special);
            let mut text: String = tokens.iter().map(|&id| decoder.push(&tokenizer, id)).collect();
            text += &decoder.finish();
            let shown = tokens.iter().filter(|&&id| special || !tokenizer.is_control(id));
            let bytes: Vec<u8> = shown.flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}

/// Any text, with what tokenizers treat specially more often than in random text.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        any::<String>(),
        "[ \\t\\r\\n]{0,6}",
        "[a-zA-Z']{0,8}",
        "[0-9]{0,4}",
        prop::sample::select(vec!["<|im_end|>", "<|im_start|>", "👩‍🚀", "é", "日本", "\u{301}"])
            .prop_map(str::to_owned)
    ];
    prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
}

/// Any token; the first 256 of this vocabulary are single bytes, which rarely form valid characters.
fn token() -> impl Strategy<Value = TokenId> {
    prop_oneof![0u32..256, 0u32..4200].prop_map(TokenId)
}
