//! Builds a [`Tokenizer`] from `tokenizer.json`. The file is not trusted.
//!
//! The same code performs the steps of these files and of GGUF files, so that the two give the same tokens. Unknown
//! steps are refused by name.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use super::bpe::{Bpe, MergeRules};
use super::merger::{Merger, Vocab};
use super::normalise::{Form, Normalise, Prepend};
use super::pre::{DIGIT, DIGITS, GPT_2, PUNCTUATION, PUNCTUATION_MARK};
use super::special::{Literal, Literals};
use super::split::Splitter;
use super::vocabulary::{SPACE, Spelling, TokenKind, Vocabulary};
use super::{Encoder, LiteralSets, Tokenizer};
use crate::TokenId;
use crate::error::{Error, Result};
use crate::format::foreign;

/// The most unused ids. Files have gaps, but a file with one token must not cause a table of billions.
const MAX_GAPS: usize = 1 << 20;

/// Builds the tokenizer without what other files in the folder add. `path` is only used in messages.
pub(super) fn tokenizer(path: &Path, document: &[u8]) -> Result<Tokenizer> {
    let file = File { path };
    let document: Document = serde_json::from_slice(document).map_err(|e| {
        file.wrong(match foreign::recognise(document) {
            Some(what) => format!("not a tokenizer: it looks like {what}"),
            None => format!("not a tokenizer: {e}; download it again"),
        })
    })?;
    let kind: ModelType = file.parse("model", document.model.get())?;
    if kind.name.as_deref().unwrap_or("BPE") != "BPE" {
        return Err(file.unsupported("model", kind.name.as_deref().unwrap_or_default(), "BPE"));
    }
    let mut model: BpeModel = file.parse("model", document.model.get())?;
    model.check(&file)?;

    let normaliser = file.normaliser(&document.normalizer)?;
    let mut cuts = Cuts::default();
    file.pre_tokeniser(&document.pre_tokenizer, &mut cuts)?;
    let decoding = file.decoding(&document.decoder, cuts.spells_bytes)?;
    let spelling = if cuts.spells_bytes { Spelling::ByteAlphabet } else { Spelling::Metaspace };

    let added = document.added_tokens;
    for token in &added {
        if token.single_word {
            let what = format!("{:?} with single_word", token.content);
            return Err(file.unsupported("added token", &what, "tokens without single_word"));
        }
    }
    let vocabulary = vocabulary(&file, &model.vocab, &added, spelling)?;
    let normalise = |text: &str| normaliser.iter().fold(text.to_owned(), |text, step| step.apply(text));
    let id_of = |token: &AddedToken| TokenId(*model.vocab.get(&*token.content).unwrap_or(&token.id));
    let literals = |control: bool| {
        let wanted = |normalised: bool| {
            let tokens = added.iter().filter(move |token| {
                token.normalized == normalised && (control || token.kind() == TokenKind::UserDefined)
            });
            let literals = tokens.map(|token| Literal {
                id: id_of(token),
                text: if normalised { normalise(&token.content) } else { token.content.to_string() },
                strips_left: token.lstrip,
                strips_right: token.rstrip,
            });
            Literals::new(literals).map_err(|e| file.wrong(format!("cannot index the added tokens: {e}")))
        };
        Ok(LiteralSets { raw: wanted(false)?, normalised: wanted(true)? })
    };
    let (literals, user_defined) = (literals(true)?, literals(false)?);
    let start = file.start(&document.post_processor, vocabulary.len())?;

    let compile = |expressions: &[String]| {
        Splitter::new(expressions.iter().map(String::as_str))
            .map_err(|e| file.wrong(format!("pre_tokenizer: {e}")))
    };
    let rules = MergeRules {
        unknown: model.unk_token.take(),
        fuses_unknown: model.fuse_unk,
        byte_fallback: model.byte_fallback,
        ignores_merges: model.ignore_merges,
    };
    let merges = model.merges.iter().map(|merge| (&*merge.0, &*merge.1));
    let encoder = Bpe {
        splitter: compile(&cuts.expressions)?,
        spelled_splitter: compile(&cuts.spelled_expressions)?,
        metaspace: cuts.metaspace,
        spelling,
        merger: Merger::new(model.vocab, merges, &rules)
            .map_err(|e| file.wrong(format!("cannot build the tokenizer: {e}")))?,
        normaliser,
    };
    Ok(Tokenizer {
        encoder: Encoder::Bpe(Box::new(encoder)),
        literals,
        user_defined,
        vocabulary,
        strips_space: decoding.strips_space,
        bos: None,
        adds_bos: !start.is_empty(),
        start,
        eos: None,
        end_tokens: vec![],
    })
}

/// The file. Parts with many variants stay JSON values; the model, which is long, is parsed twice.
#[derive(Deserialize)]
struct Document<'a> {
    #[serde(default, borrow)]
    added_tokens: Vec<AddedToken<'a>>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(borrow)]
    model: &'a RawValue,
}

#[derive(Deserialize)]
struct AddedToken<'a> {
    id: u32,
    #[serde(borrow)]
    content: Cow<'a, str>,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

impl AddedToken<'_> {
    /// The kind of the token. Like converters to GGUF, takes a token that looks like a control token for one,
    /// whatever the file says: user input must not become such a token.
    fn kind(&self) -> TokenKind {
        let text = &*self.content;
        let between = |start: &str, end: &str| text.starts_with(start) && text.ends_with(end);
        let looks_special = between("<|", "|>")
            || between("<｜", "｜>")
            || between("<unused", ">")
            || ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text);
        if self.special || looks_special { TokenKind::Control } else { TokenKind::UserDefined }
    }
}

#[derive(Deserialize)]
struct ModelType {
    #[serde(rename = "type")]
    name: Option<String>,
}

#[derive(Deserialize)]
struct BpeModel<'a> {
    vocab: Vocab,
    #[serde(borrow)]
    merges: Vec<Merge<'a>>,
    dropout: Option<f64>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

impl BpeModel<'_> {
    /// Refuses settings that would change tokens and are not supported.
    fn check(&self, file: &File) -> Result<()> {
        if self.dropout.is_some_and(|p| p != 0.0) {
            return Err(file.unsupported("model", "BPE with dropout", "BPE without dropout"));
        }
        let affixes = [&self.continuing_subword_prefix, &self.end_of_word_suffix];
        if affixes.into_iter().flatten().any(|affix| !affix.is_empty()) {
            let what = "BPE with continuing_subword_prefix or end_of_word_suffix";
            return Err(file.unsupported("model", what, "BPE without them"));
        }
        Ok(())
    }
}

/// A pair of tokens, as `["a", "b"]` or as `"a b"`.
struct Merge<'a>(Cow<'a, str>, Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Merge<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pair;

        impl<'de> Visitor<'de> for Pair {
            type Value = Merge<'de>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a merge of two tokens")
            }

            fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Merge<'de>, E> {
                let (left, right) =
                    text.split_once(' ').ok_or_else(|| E::custom("a merge is not two tokens"))?;
                Ok(Merge(Cow::Borrowed(left), Cow::Borrowed(right)))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Merge<'de>, E> {
                let (left, right) =
                    text.split_once(' ').ok_or_else(|| E::custom("a merge is not two tokens"))?;
                Ok(Merge(Cow::Owned(left.to_owned()), Cow::Owned(right.to_owned())))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut pair: A) -> Result<Merge<'de>, A::Error> {
                let mut next = || {
                    pair.next_element::<Text>()?.ok_or_else(|| de::Error::custom("a merge is not two tokens"))
                };
                let (left, right) = (next()?.0, next()?.0);
                match pair.next_element::<de::IgnoredAny>()? {
                    None => Ok(Merge(left, right)),
                    Some(_) => Err(de::Error::custom("a merge is not two tokens")),
                }
            }
        }

        deserializer.deserialize_any(Pair)
    }
}

/// A string that is borrowed if the file has no escapes in it.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// The kind and text of each id: a token of the model, an added token, or unused.
fn vocabulary(file: &File, words: &Vocab, added: &[AddedToken], spelling: Spelling) -> Result<Vocabulary> {
    let highest = words.values().copied().chain(added.iter().map(|token| token.id)).max();
    let len = highest.map_or(0, |id| id as usize + 1);
    if len > words.len() + added.len() + MAX_GAPS {
        return Err(
            file.wrong(format!("the highest token id is {}, far above the number of tokens", len - 1))
        );
    }
    let mut texts: Vec<Option<(TokenKind, &str)>> = vec![None; len];
    for (word, &id) in words {
        texts[id as usize] = Some((TokenKind::Normal, word));
    }
    for token in added {
        let id = *words.get(&*token.content).unwrap_or(&token.id);
        texts[id as usize] = Some((token.kind(), &token.content));
    }
    let mut vocabulary = Vocabulary::new(spelling);
    for text in texts {
        let (kind, text) = text.unwrap_or((TokenKind::Unused, ""));
        vocabulary.push(kind, text);
    }
    Ok(vocabulary)
}

/// The steps of pre-tokenisers.
#[derive(Default)]
struct Cuts {
    metaspace: Option<Prepend>,
    expressions: Vec<String>,
    /// Whether pieces are then spelled in the byte alphabet.
    spells_bytes: bool,
    spelled_expressions: Vec<String>,
}

impl Cuts {
    fn push(&mut self, expression: &str) {
        let expressions =
            if self.spells_bytes { &mut self.spelled_expressions } else { &mut self.expressions };
        expressions.push(expression.to_owned());
    }
}

/// The steps of decoders.
struct Decoding {
    strips_space: bool,
}

/// The deepest nesting of the file's parts.
const MAX_DEPTH: usize = 8;

/// Reads parts of the file, with errors that name it.
struct File<'a> {
    path: &'a Path,
}

impl File<'_> {
    fn wrong(&self, message: String) -> Error {
        Error::format(self.path, message)
    }

    fn unsupported(&self, part: &str, what: &str, supported: &str) -> Error {
        let path = self.path.display();
        Error::Unsupported(format!("{path}: {part}: {what} is not supported; supported: {supported}"))
    }

    fn parse<'d, T: Deserialize<'d>>(&self, part: &str, json: &'d str) -> Result<T> {
        serde_json::from_str(json).map_err(|e| self.wrong(format!("{part}: {e}")))
    }

    /// The steps of a part in order; those of a `Sequence` one by one.
    fn flat<'v>(&self, part: &str, list: &str, value: &'v Value) -> Result<Vec<(&'v str, &'v Value)>> {
        fn add<'v>(
            file: &File,
            (part, list): (&str, &str),
            value: &'v Value,
            depth: usize,
            all: &mut Vec<(&'v str, &'v Value)>,
        ) -> Result<()> {
            if value.is_null() {
                return Ok(());
            }
            let name = value.get("type").and_then(Value::as_str);
            let name = name.ok_or_else(|| file.wrong(format!("{part} has no type")))?;
            if name != "Sequence" {
                all.push((name, value));
                return Ok(());
            }
            if depth == MAX_DEPTH {
                return Err(file.wrong(format!("{part} is nested too deeply")));
            }
            let items = value.get(list).and_then(Value::as_array);
            let items = items.ok_or_else(|| file.wrong(format!("{part}: a Sequence has no {list}")))?;
            items.iter().try_for_each(|item| add(file, (part, list), item, depth + 1, all))
        }
        let mut all = Vec::new();
        add(self, (part, list), value, 0, &mut all)?;
        Ok(all)
    }

    fn normaliser(&self, value: &Value) -> Result<Vec<Normalise>> {
        const PART: &str = "normalizer";
        let steps = self.flat(PART, "normalizers", value)?;
        let text = |value: &Value, key: &str| match value.get(key) {
            Some(Value::String(text)) => Ok(text.clone()),
            _ => Err(self.wrong(format!("{PART}: {key} is not a string"))),
        };
        let step = |(name, value): (&str, &Value)| match name {
            "NFC" => Ok(Normalise::Form(Form::Nfc)),
            "NFD" => Ok(Normalise::Form(Form::Nfd)),
            "NFKC" => Ok(Normalise::Form(Form::Nfkc)),
            "NFKD" => Ok(Normalise::Form(Form::Nfkd)),
            "Prepend" => Ok(Normalise::Prepend(text(value, "prepend")?)),
            "Replace" => match value.get("pattern").and_then(|p| p.get("String")).and_then(Value::as_str) {
                Some(from) if !from.is_empty() => {
                    Ok(Normalise::Replace { from: from.to_owned(), to: text(value, "content")? })
                }
                _ => {
                    Err(self.unsupported(PART, "Replace with a regular expression", "Replace with a string"))
                }
            },
            other => Err(self.unsupported(PART, other, "NFC, NFD, NFKC, NFKD, Prepend, Replace")),
        };
        steps.into_iter().map(step).collect()
    }

    fn pre_tokeniser(&self, value: &Value, cuts: &mut Cuts) -> Result<()> {
        const PART: &str = "pre_tokenizer";
        for (name, value) in self.flat(PART, "pretokenizers", value)? {
            let flag = |key: &str, default: bool| match value.get(key) {
                None | Some(Value::Null) => Ok(default),
                Some(Value::Bool(flag)) => Ok(*flag),
                Some(_) => Err(self.wrong(format!("{PART}: {key} is not a boolean"))),
            };
            let behavior = value.get("behavior").and_then(Value::as_str).unwrap_or_default();
            match name {
                "Split" => cuts.push(&self.split(value, behavior, flag("invert", false)?)?),
                "Digits" => cuts.push(if flag("individual_digits", false)? { DIGIT } else { DIGITS }),
                "Punctuation" => match behavior {
                    "Contiguous" => cuts.push(PUNCTUATION),
                    "Isolated" | "" => cuts.push(PUNCTUATION_MARK),
                    _ => {
                        let what = format!("Punctuation with the behaviour {behavior:?}");
                        return Err(self.unsupported(PART, &what, "Contiguous, Isolated"));
                    }
                },
                "ByteLevel" => {
                    if flag("add_prefix_space", true)? {
                        let what = "ByteLevel with add_prefix_space";
                        return Err(self.unsupported(PART, what, "ByteLevel without it"));
                    }
                    if cuts.spells_bytes {
                        return Err(self.wrong(format!("{PART}: ByteLevel occurs twice")));
                    }
                    if flag("use_regex", true)? {
                        cuts.push(GPT_2);
                    }
                    cuts.spells_bytes = true;
                }
                "Metaspace" => {
                    let first = cuts.expressions.is_empty() && cuts.metaspace.is_none() && !cuts.spells_bytes;
                    if !first || !is_space(value.get("replacement")) {
                        let what = "Metaspace after another step or without `▁`";
                        return Err(self.unsupported(PART, what, "Metaspace as the first step"));
                    }
                    cuts.metaspace = Some(self.prepend(PART, value)?);
                    if flag("split", true)? {
                        cuts.push(&format!("{SPACE}[^{SPACE}]*"));
                    }
                }
                other => {
                    return Err(self.unsupported(
                        PART,
                        other,
                        "Split, Digits, Punctuation, ByteLevel, Metaspace",
                    ));
                }
            }
        }
        Ok(())
    }

    /// The expression of a `Split`: its matches and the text between them are pieces.
    fn split(&self, value: &Value, behavior: &str, inverted: bool) -> Result<String> {
        const PART: &str = "pre_tokenizer";
        let pattern = |kind: &str| value.get("pattern")?.get(kind)?.as_str();
        let text = pattern("String").filter(|text| !text.is_empty()).map(fancy_regex::escape);
        let regex = pattern("Regex");
        match (behavior, inverted, regex.map(Cow::Borrowed).or(text)) {
            // Removed and inverted: drops the text between matches, but the expressions in use match all text, so
            // nothing is dropped.
            ("Isolated", _, Some(expression)) | ("Removed", true, Some(expression)) => {
                Ok(expression.into_owned())
            }
            ("MergedWithPrevious", false, Some(text)) if regex.is_none() => Ok(format!("(?s).*?{text}")),
            ("Isolated" | "Removed" | "MergedWithPrevious", _, None) => {
                Err(self.wrong(format!("{PART}: a Split has no pattern")))
            }
            _ => {
                let what = format!("Split with the behaviour {behavior:?}");
                Err(self.unsupported(PART, &what, "Isolated, or MergedWithPrevious with a string"))
            }
        }
    }

    /// The `prepend_scheme` of a Metaspace, or its equivalent in older files.
    fn prepend(&self, part: &str, value: &Value) -> Result<Prepend> {
        match (value.get("prepend_scheme").and_then(Value::as_str), value.get("add_prefix_space")) {
            (Some("never"), _) | (None, Some(Value::Bool(false))) => Ok(Prepend::Never),
            (Some("first"), _) => Ok(Prepend::First),
            (Some("always") | None, _) => Ok(Prepend::Always),
            (Some(other), _) => Err(self.unsupported(part, other, "first, always, never")),
        }
    }

    /// The decoder's steps beyond the vocabulary's spelling.
    fn decoding(&self, value: &Value, spells_bytes: bool) -> Result<Decoding> {
        const PART: &str = "decoder";
        let mut decoding = Decoding { strips_space: false };
        let mut reads_bytes = false;
        let mut reads_spaces = false;
        for (name, value) in self.flat(PART, "decoders", value)? {
            match name {
                "ByteLevel" => reads_bytes = true,
                "Replace" => reads_spaces = true,
                "Metaspace" => {
                    reads_spaces = true;
                    decoding.strips_space = self.prepend(PART, value)? != Prepend::Never;
                }
                "Strip" => decoding.strips_space = value.get("start").and_then(Value::as_u64) != Some(0),
                "ByteFallback" | "Fuse" => {}
                other => {
                    let supported = "ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip";
                    return Err(self.unsupported(PART, other, supported));
                }
            }
        }
        match (spells_bytes, reads_bytes, reads_spaces) {
            (true, true, false) | (false, false, true) => Ok(decoding),
            _ => Err(self.unsupported(
                PART,
                "a decoder that does not undo the pre_tokenizer",
                "ByteLevel with ByteLevel, or one that writes spaces for `▁`",
            )),
        }
    }

    /// The tokens that the file puts at the start of a text.
    fn start(&self, value: &Value, count: usize) -> Result<Vec<TokenId>> {
        const PART: &str = "post_processor";
        let mut start = Vec::new();
        for (name, value) in self.flat(PART, "processors", value)? {
            match name {
                "ByteLevel" => {}
                "TemplateProcessing" => {
                    let bad = || self.wrong(format!("{PART}: unexpected template"));
                    for piece in value.get("single").and_then(Value::as_array).ok_or_else(bad)? {
                        let Some(token) = piece.get("SpecialToken") else { break };
                        let name = token.get("id").and_then(Value::as_str).ok_or_else(bad)?;
                        let ids = value.get("special_tokens").and_then(|all| all.get(name)?.get("ids"));
                        for id in ids.and_then(Value::as_array).ok_or_else(bad)? {
                            let id = id.as_u64().filter(|&id| id < count as u64).ok_or_else(bad)?;
                            start.push(TokenId(id as u32));
                        }
                    }
                }
                other => return Err(self.unsupported(PART, other, "ByteLevel, TemplateProcessing")),
            }
        }
        Ok(start)
    }
}

fn is_space(replacement: Option<&Value>) -> bool {
    replacement.and_then(Value::as_str).is_some_and(|text| text.chars().eq([SPACE]))
}
