//! Pre-tokenisers and SentencePiece give the same tokens as the libraries that define them, in both formats.

use std::path::Path;

use forebay_engine::TokenId;
use forebay_engine::internals::format::{Metadata, NumberArray, NumberKind, StringArray, Value};
use forebay_engine::tokenizer::{Bos, EncodeOptions, Tokenizer};
use forebay_testing::vectors;
use serde::Deserialize;
use serde_json::{Value as Json, json};

fn ids(tokenizer: &Tokenizer, text: &str, special: bool) -> Vec<u32> {
    let options = EncodeOptions { special, bos: Bos::Never };
    tokenizer.encode(text, options).unwrap().iter().map(|id| id.0).collect()
}

/// A tokenizer from a folder with this `tokenizer.json`.
fn from_document(document: &Json) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), serde_json::to_vec(document).unwrap()).unwrap();
    Tokenizer::from_folder(folder.path()).unwrap()
}

/// A vocabulary as in a GGUF file.
#[derive(Deserialize)]
struct Gguf {
    tokens: Vec<String>,
    #[serde(default)]
    scores: Vec<f32>,
    types: Vec<i32>,
    #[serde(default)]
    merges: Vec<String>,
}

impl Gguf {
    /// The metadata that a converter writes for a `tokenizer.json`.
    fn of(document: &Json) -> Gguf {
        let mut tokens: Vec<(u64, String, i32)> = document["model"]["vocab"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(text, id)| (id.as_u64().unwrap(), text.clone(), 1))
            .collect();
        for token in document["added_tokens"].as_array().unwrap() {
            let (id, text) = (token["id"].as_u64().unwrap(), token["content"].as_str().unwrap());
            let control = token["special"] == true || text.starts_with("<|") || text.starts_with("<｜");
            tokens.retain(|(other, ..)| *other != id);
            tokens.push((id, text.to_owned(), if control { 3 } else { 4 }));
        }
        tokens.sort();
        let mut gguf = Gguf { tokens: vec![], scores: vec![], types: vec![], merges: vec![] };
        for (id, text, kind) in tokens {
            gguf.pad(id as usize);
            gguf.tokens.push(text);
            gguf.types.push(kind);
        }
        let merges = document["model"]["merges"].as_array().unwrap().iter();
        gguf.merges = merges
            .map(|merge| match merge {
                Json::Array(pair) => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
                text => text.as_str().unwrap().to_owned(),
            })
            .collect();
        gguf
    }

    /// Adds unused tokens until there are `count`.
    fn pad(&mut self, count: usize) {
        while self.tokens.len() < count {
            self.tokens.push(format!("[PAD{}]", self.tokens.len()));
            self.types.push(5);
        }
    }

    fn tokenizer(&self, model: &str, pre: Option<&str>) -> Tokenizer {
        let strings = |texts: &[String]| {
            let mut all = StringArray::default();
            texts.iter().for_each(|text| all.push(text));
            Value::Strings(all)
        };
        let scores = self.scores.iter().flat_map(|score| score.to_le_bytes()).collect();
        let types = self.types.iter().flat_map(|kind| kind.to_le_bytes()).collect();
        let mut metadata = Metadata::default();
        let mut set = |key: &str, value| metadata.insert(format!("tokenizer.ggml.{key}"), value).unwrap();
        set("model", Value::String(model.to_owned()));
        if let Some(pre) = pre {
            set("pre", Value::String(pre.to_owned()));
        }
        set("tokens", strings(&self.tokens));
        set("merges", strings(&self.merges));
        set("scores", Value::Numbers(NumberArray::new(NumberKind::F32, scores)));
        set("token_type", Value::Numbers(NumberArray::new(NumberKind::I32, types)));
        let [unknown, bos, eos] = if model == "gemma4" { [3, 2, 1] } else { [0, 1, 2] };
        set("unknown_token_id", Value::Unsigned(unknown));
        set("bos_token_id", Value::Unsigned(bos));
        set("eos_token_id", Value::Unsigned(eos));
        set("add_bos_token", Value::Bool(model == "llama"));
        Tokenizer::from_metadata(Path::new("vectors.gguf"), &metadata).unwrap()
    }
}

#[derive(Deserialize)]
struct PreVectors {
    tokenizer: Json,
    texts: Vec<String>,
    pre: Vec<PreVector>,
}

#[derive(Deserialize)]
struct PreVector {
    /// The `tokenizer.ggml.pre` of these steps with this normaliser, which GGUF files do not mention.
    names: Vec<String>,
    ignore_merges: bool,
    normalizer: Json,
    steps: Json,
    ids: Vec<Vec<u32>>,
}

#[test]
fn pre_tokenisers_cut_like_the_models_own_tokenizers() {
    let data: PreVectors = serde_json::from_str(include_str!("../data/tokenizer_pre.json")).unwrap();
    let mut document = data.tokenizer;
    let mut gguf = Gguf::of(&document);
    // As large as published vocabularies: with a smaller one characters are not composed.
    gguf.pad(50_000);
    for vector in data.pre {
        document["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": vector.steps});
        document["normalizer"] = vector.normalizer.clone();
        document["model"]["ignore_merges"] = vector.ignore_merges.into();
        let mut tokenizers = vec![("folder", from_document(&document))];
        tokenizers.extend(vector.names.iter().map(|name| (&**name, gguf.tokenizer("gpt2", Some(name)))));
        assert_eq!(vector.ids.len(), data.texts.len());
        for (container, tokenizer) in &tokenizers {
            for (text, expected) in data.texts.iter().zip(&vector.ids) {
                assert_eq!(
                    ids(tokenizer, text, true),
                    *expected,
                    "{container}, {:?}: {text:?}",
                    vector.names
                );
                let tokens: Vec<_> = expected.iter().copied().map(TokenId).collect();
                if vector.normalizer.is_null() {
                    assert_eq!(tokenizer.decode(&tokens, true), *text);
                }
            }
        }
    }
}

#[derive(Deserialize)]
struct PieceVectors {
    gguf: Gguf,
    tokenizer: Json,
    vectors: Vec<Vector>,
}

#[derive(Deserialize)]
struct Vector {
    text: String,
    special: bool,
    ids: Vec<u32>,
    /// The tokens if only the start of the text gets a space in front.
    prepend_first: Option<Vec<u32>>,
}

#[test]
fn sentencepiece_merges_like_its_own_library() {
    let data: PieceVectors =
        serde_json::from_str(include_str!("../data/tokenizer_sentencepiece.json")).unwrap();
    let gguf = data.gguf.tokenizer("llama", None);
    let mut document = data.tokenizer;
    let folder = from_document(&document);
    document["normalizer"] = Json::Null;
    document["pre_tokenizer"] =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
    let first = from_document(&document);
    for tokenizer in [&gguf, &folder, &first] {
        assert!(tokenizer.adds_bos());
        assert_eq!(tokenizer.encode("", EncodeOptions::default()).unwrap(), [TokenId(1)]);
    }
    let mut firsts = 0;
    for v in data.vectors {
        assert_eq!(ids(&gguf, &v.text, v.special), v.ids, "gguf: {:?}", v.text);
        assert_eq!(ids(&folder, &v.text, v.special), v.ids, "folder: {:?}", v.text);
        if let Some(expected) = v.prepend_first {
            assert_eq!(ids(&first, &v.text, v.special), expected, "first: {:?}", v.text);
            firsts += 1;
        }
        // After a control token the encoder puts a space that no decoder removes.
        if !v.special || !v.ids.iter().any(|&id| gguf.is_control(TokenId(id))) {
            let tokens: Vec<_> = v.ids.iter().copied().map(TokenId).collect();
            assert_eq!(gguf.decode(&tokens, true), v.text);
            assert_eq!(folder.decode(&tokens, true), v.text);
        }
    }
    assert!(firsts > 10);
}

/// The folder's tokenizer, and that of the GGUF file that a converter of Gemma 4 writes.
fn gemma(document: &Json) -> [Tokenizer; 2] {
    let mut gguf = Gguf::of(document);
    for (text, kind) in gguf.tokens.iter().zip(&mut gguf.types) {
        match &**text {
            // The first converted files have these two types.
            "<|tool_call>" | "<tool_call|>" => *kind = 4,
            "<eos>" => *kind = 1,
            text if text.starts_with("<0x") => *kind = 6,
            _ => {}
        }
    }
    [from_document(document), gguf.tokenizer("gemma4", None)]
}

#[derive(Deserialize)]
struct GemmaVectors {
    tokenizer: Json,
    vectors: Vec<Vector>,
}

#[test]
fn gemma_4_merges_across_words_and_lines_like_its_own_library() {
    let data: GemmaVectors = serde_json::from_str(include_str!("../data/tokenizer_gemma.json")).unwrap();
    let [folder, gguf] = gemma(&data.tokenizer);
    for v in &data.vectors {
        for (container, tokenizer) in [("folder", &folder), ("gguf", &gguf)] {
            assert_eq!(ids(tokenizer, &v.text, v.special), v.ids, "{container}, {}: {:?}", v.special, v.text);
            let tokens: Vec<_> = v.ids.iter().copied().map(TokenId).collect();
            assert_eq!(tokenizer.decode(&tokens, true), v.text, "{container}");
        }
    }
    for id in (0..folder.vocab_size() as u32).map(TokenId) {
        assert_eq!(folder.token_bytes(id), gguf.token_bytes(id));
        assert_eq!(folder.is_control(id), gguf.is_control(id), "{}", folder.token_text(id));
    }
    for (text, id) in [("<turn|>", 6), ("<|tool_call>", 7)] {
        assert_eq!(gguf.find(text), Some(TokenId(id)));
        assert!(ids(&gguf, text, false).len() > 1, "a user cannot write {text}");
    }
    assert_eq!(gguf.end_tokens(), [TokenId(1), TokenId(6)]);
    assert!(gguf.adds_bos(), "although the file does not say so");
    // All 256 bytes have tokens, so the bound does not collapse.
    assert!(gguf.fewest_tokens(&"x".repeat(10_000)) > 0);
}

#[derive(Deserialize)]
struct RealVectors {
    /// The `tokenizer.ggml.pre` of the model.
    pre: Option<String>,
    gguf: Option<Gguf>,
    vectors: Vec<Vector>,
}

/// Compares with real vocabularies from a folder that `tools/tokenizer_real.py` writes.
#[test]
fn real_vocabularies_give_the_same_tokens_as_their_own_libraries() {
    let Some(folder) = vectors("FOREBAY_TOKENIZERS", "tokenizer_real.py") else { return };
    let mut seen = 0;
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let data: RealVectors =
            serde_json::from_slice(&std::fs::read(path.join("vectors.json")).unwrap()).unwrap();
        let mut tokenizers = Vec::new();
        if let Ok(document) = std::fs::read(path.join("tokenizer.json")) {
            tokenizers.push(Tokenizer::from_folder(&path).unwrap());
            if let Some(pre) = &data.pre {
                let gguf = Gguf::of(&serde_json::from_slice(&document).unwrap());
                tokenizers.push(gguf.tokenizer("gpt2", Some(pre)));
            }
        }
        tokenizers.extend(data.gguf.map(|gguf| gguf.tokenizer("llama", None)));
        assert!(!tokenizers.is_empty(), "{}", path.display());
        for v in &data.vectors {
            for tokenizer in &tokenizers {
                let actual = ids(tokenizer, &v.text, v.special);
                assert_eq!(actual, v.ids, "{}, special: {}: {:?}", path.display(), v.special, v.text);
            }
        }
        seen += 1;
    }
    assert!(seen > 0);
}
