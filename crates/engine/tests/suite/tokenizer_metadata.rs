//! Any metadata gives a working tokenizer or an error that names the problem.

use std::path::Path;

use forebay_engine::internals::format::{Metadata, NumberArray, NumberKind, StringArray, Value};
use forebay_engine::tokenizer::{Bos, EncodeOptions, StreamDecoder, Tokenizer};
use forebay_engine::{Error, Result, TokenId};

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

/// A vocabulary for a test to change: the bytes of `a`, `b`, `c`, space and `é`, one merge, then the rest.
#[derive(Clone)]
struct File {
    tokens: Vec<(&'static str, i32)>,
    merges: Vec<&'static str>,
    others: Vec<(&'static str, Value)>,
}

impl File {
    fn new() -> File {
        let text = |key, value: &str| (key, Value::String(value.to_owned()));
        File {
            tokens: ["a", "b", "c", "Ġ", "Ã", "©", "ab"].map(|t| (t, NORMAL)).to_vec(),
            merges: vec!["a b"],
            others: vec![text("tokenizer.ggml.model", "gpt2"), text("tokenizer.ggml.pre", "gpt-2")],
        }
    }

    fn token(mut self, text: &'static str, kind: i32) -> File {
        self.tokens.push((text, kind));
        self
    }

    fn merge(mut self, merge: &'static str) -> File {
        self.merges.push(merge);
        self
    }

    /// Sets a key, replacing the default.
    fn set(mut self, key: &'static str, value: Value) -> File {
        self.others.retain(|(k, _)| *k != key);
        self.others.push((key, value));
        self
    }

    fn metadata(&self) -> Metadata {
        let mut strings = StringArray::default();
        self.tokens.iter().for_each(|(text, _)| strings.push(text));
        let mut merges = StringArray::default();
        self.merges.iter().for_each(|merge| merges.push(merge));
        let types = self.tokens.iter().flat_map(|(_, kind)| kind.to_le_bytes()).collect();

        let mut metadata = Metadata::default();
        for (key, value) in &self.others {
            metadata.insert((*key).to_owned(), value.clone()).unwrap();
        }
        // A key that the test has set is kept.
        let _ = metadata.insert("tokenizer.ggml.tokens".to_owned(), Value::Strings(strings));
        let _ = metadata.insert("tokenizer.ggml.merges".to_owned(), Value::Strings(merges));
        let types = Value::Numbers(NumberArray::new(NumberKind::I32, types));
        let _ = metadata.insert("tokenizer.ggml.token_type".to_owned(), types);
        metadata
    }

    fn open(&self) -> Result<Tokenizer> {
        Tokenizer::from_metadata(Path::new("model.gguf"), &self.metadata())
    }

    /// The error message for a damaged file.
    fn refusal(&self) -> String {
        match self.open() {
            Err(e @ Error::Format { .. }) => e.to_string(),
            other => panic!("{other:?}"),
        }
    }
}

fn ids(tokenizer: &Tokenizer, text: &str, special: bool) -> Vec<u32> {
    let options = EncodeOptions { special, bos: Bos::AsFileSays };
    tokenizer.encode(text, options).unwrap().iter().map(|id| id.0).collect()
}

#[test]
fn merges_apply_within_words() {
    let tokenizer = File::new().open().unwrap();
    assert_eq!(ids(&tokenizer, "ab a bé", false), [6, 3, 0, 3, 1, 4, 5]);
}

#[test]
fn a_word_that_is_a_token_is_not_merged_if_merges_are_ignored() {
    // The merges produce `a` and `bc`, and never `abc`.
    let of = |pre: &str| {
        let file = File { merges: vec!["b c"], ..File::new().token("bc", NORMAL).token("abc", NORMAL) };
        let file = file.set("tokenizer.ggml.pre", Value::String(pre.to_owned()));
        let file = file.set("tokenizer.ggml.add_bos_token", Value::Bool(false));
        ids(&file.open().unwrap(), "abc cabc", false)
    };
    for pre in ["glm4", "glm5", "youtu", "llama-bpe", "tekken"] {
        assert_eq!(of(pre), [8, 3, 2, 0, 7], "{pre}");
    }
    for pre in ["chatglm-bpe", "gpt-4o", "kanana2", "qwen2", "solar-open", "deepseek-v3", "joyai-llm"] {
        assert_eq!(of(pre), [0, 7, 3, 2, 0, 7], "{pre}");
    }
}

#[test]
fn control_tokens_are_text_unless_requested() {
    let tokenizer = File::new()
        .token("c", CONTROL)
        .token("<", NORMAL)
        .token("<a>", CONTROL)
        .token(">", NORMAL)
        .token("bb", USER_DEFINED)
        .token("a<", UNKNOWN)
        .open()
        .unwrap();
    // `c` is a normal token and, later, a control token: BPE uses the normal one.
    assert_eq!(ids(&tokenizer, "c", false), [2]);
    assert_eq!(ids(&tokenizer, "<a>bbb", false), [8, 0, 10, 11, 1]);
    assert_eq!(ids(&tokenizer, "<a>bbb", true), [9, 11, 1]);
    let tokens = [TokenId(9), TokenId(0), TokenId(11), TokenId(12)];
    assert_eq!(tokenizer.decode(&tokens, false), "abb");
    assert_eq!(tokenizer.decode(&tokens, true), "<a>abba<");
}

#[test]
fn the_caller_and_the_file_decide_on_bos() {
    let file = File::new().token("<s>", CONTROL).set("tokenizer.ggml.bos_token_id", Value::Unsigned(7));
    let with = |file: &File, bos| {
        let tokens = file.open().unwrap().encode("a", EncodeOptions { special: false, bos });
        tokens.map(|tokens| tokens.len())
    };
    assert_eq!(with(&file, Bos::AsFileSays).unwrap(), 1);
    assert_eq!(with(&file, Bos::Always).unwrap(), 2);
    let adds = file.set("tokenizer.ggml.add_bos_token", Value::Bool(true));
    assert_eq!(with(&adds, Bos::AsFileSays).unwrap(), 2);
    assert_eq!(with(&adds, Bos::Never).unwrap(), 1);
    assert!(adds.open().unwrap().adds_bos());
    assert!(matches!(with(&File::new(), Bos::Always), Err(Error::Invalid(_))));
    let nameless = File::new().set("tokenizer.ggml.add_bos_token", Value::Bool(true));
    assert!(nameless.refusal().contains("bos_token_id is missing"));
}

#[test]
fn end_tokens_are_those_of_the_file_without_duplicates() {
    let tokenizer = File::new()
        .set("tokenizer.ggml.eos_token_id", Value::Unsigned(3))
        .set("tokenizer.ggml.eot_token_id", Value::Signed(2))
        .set("tokenizer.ggml.eom_token_id", Value::Unsigned(3))
        .open()
        .unwrap();
    assert_eq!(tokenizer.end_tokens(), [TokenId(3), TokenId(2)]);
    assert!(File::new().open().unwrap().end_tokens().is_empty());
}

#[test]
fn end_tokens_that_files_omit_are_found_by_name() {
    let ends = |file: File| file.open().unwrap().end_tokens().to_vec();
    let first = File::new().tokens.len() as u32;
    let id = |i| TokenId(first + i);
    let chat = File::new().token("<|im_end|>", CONTROL).token("<|eot_id|>", USER_DEFINED);
    assert_eq!(ends(chat), [id(0)]);
    // In gpt-oss a call ends the answer, but the end of a message does not.
    let harmony = File::new()
        .token("<|end|>", CONTROL)
        .token("<|return|>", CONTROL)
        .token("<|call|>", CONTROL)
        .set("tokenizer.ggml.eos_token_id", Value::Unsigned(first.into()));
    assert_eq!(ends(harmony), [id(2), id(1)]);
    let other = File::new()
        .token("<|end|>", CONTROL)
        .set("tokenizer.ggml.eos_token_id", Value::Unsigned(first.into()));
    assert_eq!(ends(other), [id(0)]);
    // The same holds in Solar Open.
    let solar = File::new()
        .token("<|end|>", CONTROL)
        .token("<|flush|>", CONTROL)
        .token("<|calls|>", CONTROL)
        .set("tokenizer.ggml.eos_token_id", Value::Unsigned(first.into()));
    assert_eq!(ends(solar), [id(2), id(1)]);
    // Gemma 4 ends a call with the token that starts its result.
    let result = |file: File| file.token("<|tool_response>", USER_DEFINED);
    assert_eq!(ends(result(File::new().token("<turn|>", CONTROL))), [id(0), id(1)]);
    assert_eq!(ends(result(File::new())), []);
    // GLM ends an answer with the token that starts the next turn.
    let users = |file: File| file.token("<|user|>", CONTROL).token("<|observation|>", CONTROL);
    assert_eq!(ends(users(File::new().token("[gMASK]", CONTROL))), [id(1), id(2)]);
    assert_eq!(ends(users(File::new())), []);
}

#[test]
fn shown_control_tokens_are_text() {
    let tokenizer = File::new().token("<x>", CONTROL).token("<y>", CONTROL).open().unwrap();
    let tokens: Vec<TokenId> =
        ["a", "<x>", "b", "<y>", "c"].iter().map(|t| tokenizer.find(t).unwrap()).collect();
    let mut decoder = StreamDecoder::continuing(false).showing(vec![tokens[3]]);
    let text: String = tokens.iter().map(|&token| decoder.push(&tokenizer, token)).collect();
    assert_eq!(text, "ab<y>c");
}

#[test]
fn a_character_cut_by_tokens_is_streamed_whole() {
    let tokenizer = File::new().open().unwrap();
    let mut decoder = StreamDecoder::new(false);
    let pushed: Vec<_> = [0, 4, 5, 4, 4].map(|id| decoder.push(&tokenizer, TokenId(id))).into();
    assert_eq!(pushed, ["a", "", "é", "", "\u{fffd}"]);
    assert_eq!(decoder.finish(), "\u{fffd}");
}

#[test]
fn of_two_tokens_with_the_same_text_the_first_is_used() {
    let tokenizer = File::new().token("ab", NORMAL).open().unwrap();
    assert_eq!(ids(&tokenizer, "ab", false), [6]);
    assert_eq!(tokenizer.decode(&[TokenId(7)], false), "ab");
}

#[test]
fn a_rare_byte_without_a_token_is_dropped() {
    // Falcon's vocabulary lacks the byte 0x1c, those of StarCoder and Refact lack 0xf1. Their files may name an
    // unknown token, which the models' own tokenizers do not use.
    let unknown =
        File::new().token("<unk>", UNKNOWN).set("tokenizer.ggml.unknown_token_id", Value::Unsigned(7));
    for file in [File::new(), unknown] {
        let tokenizer = file.open().unwrap();
        assert_eq!(ids(&tokenizer, "c\u{1c}", false), [2]);
        assert!(ids(&tokenizer, "\u{1c}", false).is_empty());
        for (text, byte) in [("a!", "0x21"), ("\u{1c}!", "0x21"), ("\n", "0x0a"), ("\u{40000}", "0x80")] {
            let error = tokenizer.encode(text, EncodeOptions::default()).unwrap_err();
            assert!(matches!(&error, Error::Invalid(m) if m.contains(byte)), "{error}");
        }
    }
    let letters = File::new().set("tokenizer.ggml.pre", Value::String("deepseek-llm".to_owned()));
    assert_eq!(ids(&letters.open().unwrap(), "a\u{1c}b", false), [0, 1]);
}

#[test]
fn special_tokens_of_phi_3_strip_the_white_space_after_them() {
    let scores = [0f32; 7].iter().flat_map(|score| score.to_le_bytes()).collect();
    let text = |text: &str| Value::String(text.to_owned());
    let file = File {
        tokens: vec![
            ("<unk>", UNKNOWN),
            ("<s>", CONTROL),
            ("▁", NORMAL),
            ("a", NORMAL),
            ("<|user|>", CONTROL),
            ("<|endoftext|>", CONTROL),
            ("\n", NORMAL),
        ],
        merges: vec![],
        others: vec![
            ("tokenizer.ggml.model", text("llama")),
            ("tokenizer.ggml.scores", Value::Numbers(NumberArray::new(NumberKind::F32, scores))),
            ("tokenizer.ggml.bos_token_id", Value::Unsigned(1)),
            ("tokenizer.ggml.unknown_token_id", Value::Unsigned(0)),
            ("tokenizer.ggml.add_bos_token", Value::Bool(false)),
            ("tokenizer.ggml.add_space_prefix", Value::Bool(false)),
        ],
    };
    let prompt = "a <|user|> \n a<|endoftext|> a";
    let llama = file.clone().set("general.architecture", text("llama")).open().unwrap();
    assert_eq!(ids(&llama, prompt, true), [3, 2, 4, 2, 6, 2, 3, 5, 2, 3]);
    let phi = file.set("general.architecture", text("phi3")).open().unwrap();
    assert_eq!(ids(&phi, prompt, true), [3, 2, 4, 3, 5, 2, 3]);
    // Without `special`, their texts are plain text.
    assert_eq!(ids(&phi, "a a", false), [3, 2, 3]);
}

#[test]
fn token_types_may_be_absent() {
    let mut metadata = Metadata::default();
    for (key, value) in File::new().metadata().iter().filter(|(key, _)| !key.ends_with("token_type")) {
        metadata.insert(key.to_owned(), value.clone()).unwrap();
    }
    assert!(Tokenizer::from_metadata(Path::new("model.gguf"), &metadata).is_ok());
}

#[test]
fn unsupported_settings_are_named_with_the_supported_ones() {
    let refused = |key, value: &str| match File::new().set(key, Value::String(value.to_owned())).open() {
        Err(Error::Unsupported(message)) => message,
        other => panic!("{other:?}"),
    };
    let message = refused("tokenizer.ggml.model", "t5");
    assert!(message.contains("`t5`") && message.contains("gpt2") && message.contains("llama"), "{message}");
    let message = refused("tokenizer.ggml.pre", "superbpe");
    assert!(message.contains("`superbpe`") && message.contains("qwen2, deepseek-r1-qwen"), "{message}");
}

#[test]
fn a_missing_or_mistyped_key_is_named() {
    for key in ["model", "tokens", "merges"].map(|key| format!("tokenizer.ggml.{key}")) {
        let mut without = Metadata::default();
        let mut mistyped = Metadata::default();
        for (k, value) in File::new().metadata().iter() {
            let wrong = if k == key { Value::Float(1.0) } else { value.clone() };
            mistyped.insert(k.to_owned(), wrong).unwrap();
            if k != key {
                without.insert(k.to_owned(), value.clone()).unwrap();
            }
        }
        for metadata in [without, mistyped] {
            let error = Tokenizer::from_metadata(Path::new("model.gguf"), &metadata).unwrap_err();
            assert!(matches!(error, Error::Format { .. }) && error.to_string().contains(&key), "{error}");
        }
    }
}

#[test]
fn a_missing_pre_tokeniser_is_the_default_one() {
    let mut file = File::new();
    file.others.retain(|(key, _)| *key != "tokenizer.ggml.pre");
    let digits = |file: File| file.token("1", NORMAL).token("11", NORMAL).merge("1 1").open().unwrap();
    // The default cuts digits in threes; GPT-2 does not.
    assert_eq!(ids(&digits(file), "1111", false), [8, 7, 7]);
    assert_eq!(ids(&digits(File::new()), "1111", false), [8, 8]);
    let mistyped = File::new().set("tokenizer.ggml.pre", Value::Bool(true));
    assert!(mistyped.refusal().contains("tokenizer.ggml.pre is not a string"));
}

#[test]
fn a_bad_merge_is_named() {
    for merge in ["ab", " ab", "a ", ""] {
        let message = File::new().merge(merge).refusal();
        assert!(message.contains("merge 1,") && message.contains(&format!("`{merge}`")), "{message}");
    }
}

#[test]
fn merges_of_tokens_outside_the_vocabulary_never_apply() {
    // The last merge would be longer than any token.
    for merge in ["a x", "x a", "b a", "a b c", "ab ab"] {
        let tokenizer = File::new().merge(merge).open().unwrap();
        assert_eq!(ids(&tokenizer, "ab a bé", false), [6, 3, 0, 3, 1, 4, 5]);
    }
}

#[test]
fn lists_of_different_lengths_are_refused() {
    let types = Value::Numbers(NumberArray::new(NumberKind::I32, vec![1, 0, 0, 0]));
    let message = File::new().set("tokenizer.ggml.token_type", types).refusal();
    assert!(message.contains("1 entries for 7 tokens"), "{message}");
}

#[test]
fn an_unknown_token_type_is_refused() {
    for kind in [7, -1, i32::MAX] {
        assert!(File::new().token("d", kind).refusal().contains("token 7"));
    }
}

#[test]
fn a_token_outside_the_vocabulary_is_refused() {
    for key in ["bos", "eos", "eot", "eom", "unknown"] {
        let key: &'static str = format!("tokenizer.ggml.{key}_token_id").leak();
        for value in [Value::Unsigned(7), Value::Signed(-1), Value::Unsigned(1 << 40), Value::Bool(true)] {
            assert!(File::new().set(key, value).refusal().contains(key));
        }
    }
}

#[test]
fn an_empty_vocabulary_spells_nothing() {
    let mut file = File::new();
    file.tokens.clear();
    file.merges.clear();
    let tokenizer = file.open().unwrap();
    assert!(ids(&tokenizer, "", true).is_empty());
    assert!(tokenizer.encode("a", EncodeOptions::default()).is_err());
    assert_eq!(tokenizer.find(""), None);
}

#[test]
fn an_empty_special_token_matches_nothing() {
    let tokenizer = File::new().token("", CONTROL).token("", USER_DEFINED).open().unwrap();
    assert_eq!(ids(&tokenizer, "ab", true), [6]);
}
