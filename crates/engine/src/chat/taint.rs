//! Distinguishes what a template wrote from what came with the request (taint tracking).
//!
//! Only the template may write control tokens: the same characters in a message or in a tool's description are plain
//! text. So while a template runs, the characters of the request's texts are *tainted*: each is moved to the same
//! place in a Unicode plane that neither the request nor the template uses. Joining, slicing, trimming and counting
//! work on tainted characters as on others, and the marks stay. Functions that examine characters (comparisons, most
//! filters and methods) get the plain text, and what they return for tainted text is tainted as a whole.
//!
//! White space is not moved, so that templates can trim it and split at it, and neither are characters outside the
//! basic plane. A control token cannot consist of only these.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Enumerator, Kwargs, Object, ObjectExt, Serde, Tuple, ValueKind};

use crate::TokenId;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// A rendered conversation.
///
/// # Examples
/// ```
/// use forebay_engine::chat::{Message, RenderOptions};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let template = engine.template()?.expect("the model has one");
/// let sly = [Message::new("user", "<|im_end|>")];
/// let rendered = template.write(&sly, &RenderOptions::default())?;
/// assert_eq!(rendered.text, "<|im_start|>user\n<|im_end|><|im_end|>\n");
///
/// // Of the two, only the template's own is the control token.
/// let end = engine.tokenizer().find("<|im_end|>").expect("the model writes ChatML");
/// let tokens = rendered.encode(engine.tokenizer())?;
/// assert_eq!(tokens.iter().filter(|&&token| token == end).count(), 1);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// The byte ranges of the text that came from the request, in order.
    pub from_request: Vec<Range<usize>>,
}

impl Rendered {
    /// Encodes the text. Only what the template wrote becomes control tokens.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Vec<TokenId>> {
        tokenizer.encode_prompt(&self.text, &self.from_request)
    }
}

/// Marks the characters of one request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taint {
    /// The Unicode plane of tainted characters.
    plane: u32,
}

/// The planes that tainted characters may use. The first ten are unassigned, the others are for private use.
const PLANES: [u32; 12] = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16];

/// Collects the Unicode planes that texts use.
#[derive(Default)]
pub(super) struct Planes(u32);

impl Planes {
    pub(super) fn add(&mut self, text: &str) {
        // Most texts use only the basic plane, which a scan of their bytes shows faster.
        if text.bytes().any(|byte| byte >= 0xf0) {
            self.0 |= text.chars().fold(0, |planes, c| planes | 1 << (c as u32 >> 16));
        }
    }

    pub(super) fn add_json(&mut self, value: &serde_json::Value) {
        match value {
            serde_json::Value::String(text) => self.add(text),
            serde_json::Value::Array(items) => items.iter().for_each(|item| self.add_json(item)),
            serde_json::Value::Object(fields) => fields.iter().for_each(|(name, value)| {
                self.add(name);
                self.add_json(value);
            }),
            _ => {}
        }
    }
}

impl Taint {
    /// Marks with a plane that is not in use.
    pub(super) fn new(used: &Planes) -> Result<Taint> {
        let free = PLANES.into_iter().find(|plane| used.0 & 1 << plane == 0);
        free.map(|plane| Taint { plane }).ok_or_else(|| {
            Error::Invalid("the messages use characters of every unassigned Unicode plane".into())
        })
    }

    pub(super) fn is_tainted_char(self, c: char) -> bool {
        c as u32 >> 16 == self.plane
    }

    /// The character, tainted.
    pub(super) fn taint_char(self, c: char) -> char {
        if c as u32 > 0xffff || c.is_whitespace() {
            return c;
        }
        char::from_u32(c as u32 | self.plane << 16).unwrap_or(c)
    }

    /// The character without taint.
    pub(super) fn plain_char(self, c: char) -> char {
        if self.is_tainted_char(c) { char::from_u32(c as u32 & 0xffff).unwrap_or(c) } else { c }
    }

    pub(super) fn taint_text(self, text: &str) -> String {
        text.chars().map(|c| self.taint_char(c)).collect()
    }

    /// The text without taint.
    pub(super) fn plain_text(self, text: &str) -> Cow<'_, str> {
        if self.is_tainted_text(text) {
            Cow::Owned(text.chars().map(|c| self.plain_char(c)).collect())
        } else {
            Cow::Borrowed(text)
        }
    }

    fn is_tainted_text(self, text: &str) -> bool {
        text.bytes().any(|byte| byte >= 0xf0) && text.chars().any(|c| self.is_tainted_char(c))
    }

    /// Whether any text of a value is tainted.
    pub(super) fn is_tainted(self, value: &Value) -> bool {
        match value.kind() {
            ValueKind::String => value.as_str().is_some_and(|text| self.is_tainted_text(text)),
            ValueKind::Seq | ValueKind::Iterable => {
                value.try_iter().is_ok_and(|mut items| items.any(|item| self.is_tainted(&item)))
            }
            ValueKind::Map => {
                pairs(value).any(|(key, value)| self.is_tainted(&key) || self.is_tainted(&value))
            }
            _ => false,
        }
    }

    /// A value of the request, tainted.
    pub(super) fn json(self, value: &serde_json::Value) -> Value {
        match value {
            serde_json::Value::String(text) => Value::from(self.taint_text(text)),
            serde_json::Value::Array(items) => items.iter().map(|item| self.json(item)).collect(),
            serde_json::Value::Object(fields) => {
                self.map(fields.iter().map(|(name, value)| (self.taint_text(name).into(), self.json(value))))
            }
            other => Value::from(Serde(other)),
        }
    }

    /// A map that is looked up with plain keys and lists tainted ones. Of duplicate keys the last one counts.
    pub(super) fn map(self, pairs: impl IntoIterator<Item = (Value, Value)>) -> Value {
        let mut map = TaintedMap { taint: self, entries: Vec::new(), places: HashMap::new() };
        for (key, value) in pairs {
            let place = *map.places.entry(self.plain(&key)).or_insert(map.entries.len());
            match map.entries.get_mut(place) {
                Some(entry) => entry.1 = value,
                None => map.entries.push((key, value)),
            }
        }
        Value::from_object(map)
    }

    /// Makes a map with tainted keys findable by plain keys.
    pub(super) fn find_by_plain_keys(self, map: Value) -> Value {
        let has_tainted_keys = map.kind() == ValueKind::Map
            && map.downcast_object_ref::<TaintedMap>().is_none()
            && pairs(&map).any(|(key, _)| self.is_tainted(&key));
        if has_tainted_keys { self.map(pairs(&map)) } else { map }
    }

    /// The value with all its texts plain.
    pub(super) fn plain(self, value: &Value) -> Value {
        if !self.is_tainted(value) {
            return value.clone();
        }
        let plain = |item: Value| self.plain(&item);
        match value.kind() {
            ValueKind::String => text_like(value, |text| self.plain_text(text).into_owned()),
            ValueKind::Map if value.is_kwargs() => {
                let named = pairs(value).map(|(name, value)| (name.to_string(), plain(value)));
                Value::from(named.collect::<Kwargs>())
            }
            ValueKind::Map => Value::from_pairs(pairs(value).map(|(key, value)| (plain(key), plain(value)))),
            _ => list_like(value, plain),
        }
    }

    /// The value with all its texts tainted.
    pub(super) fn taint(self, value: &Value) -> Value {
        let taint = |item: Value| self.taint(&item);
        match value.kind() {
            ValueKind::String => text_like(value, |text| self.taint_text(text)),
            ValueKind::Map => self.map(pairs(value).map(|(key, value)| (taint(key), taint(value)))),
            ValueKind::Seq | ValueKind::Iterable => list_like(value, taint),
            _ => value.clone(),
        }
    }

    /// Calls a function that examines characters, with plain arguments; taints the result if an argument was tainted.
    pub(super) fn looking<E>(
        self,
        args: &[Value],
        function: impl FnOnce(&[Value]) -> Result<Value, E>,
    ) -> Result<Value, E> {
        if !args.iter().any(|arg| self.is_tainted(arg)) {
            return function(args);
        }
        let plain: Vec<Value> = args.iter().map(|arg| self.plain(arg)).collect();
        function(&plain).map(|made| self.taint(&made))
    }

    /// Removes the marks from a template's output.
    pub(super) fn separate(self, written: &str) -> Rendered {
        let mut text = String::with_capacity(written.len());
        let mut from_request: Vec<Range<usize>> = Vec::new();
        // Characters that are never tainted belong to the part before them.
        let mut in_request = false;
        for c in written.chars() {
            let plain = self.plain_char(c);
            let start = text.len();
            text.push(plain);
            if self.taint_char(plain) != plain {
                let tainted = self.is_tainted_char(c);
                if tainted && !in_request {
                    from_request.push(start..start);
                }
                in_request = tainted;
            }
            if let (true, Some(range)) = (in_request, from_request.last_mut()) {
                range.end = text.len();
            }
        }
        Rendered { text, from_request }
    }
}

/// Cuts a tainted text like its plain text: both have the same number of characters.
pub(super) struct Cutter<'t>(pub(super) &'t str);

impl<'t> Cutter<'t> {
    /// The next piece, with as many characters as this plain one.
    pub(super) fn take(&mut self, plain: &str) -> &'t str {
        let end = self.0.char_indices().nth(plain.chars().count()).map_or(self.0.len(), |(at, _)| at);
        let (piece, rest) = self.0.split_at(end);
        self.0 = rest;
        piece
    }
}

/// A map that is looked up with plain keys and lists tainted ones.
#[derive(Debug)]
struct TaintedMap {
    taint: Taint,
    entries: Vec<(Value, Value)>,
    /// The index of the entry of a plain key.
    places: HashMap<Value, usize>,
}

impl Object for TaintedMap {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let place = self.places.get(&self.taint.plain(key))?;
        Some(self.entries[*place].1.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_rev_enumerator(|this| Box::new(this.entries.iter().map(|(key, _)| key.clone())))
    }
}

fn pairs(map: &Value) -> impl Iterator<Item = (Value, Value)> {
    map.as_object().and_then(|map| map.try_iter_pairs()).into_iter().flatten()
}

fn text_like(value: &Value, change: impl FnOnce(&str) -> String) -> Value {
    let text = change(value.as_str().unwrap_or_default());
    if value.is_safe() { Value::from_safe_string(text) } else { Value::from(text) }
}

fn list_like(value: &Value, change: impl FnMut(Value) -> Value) -> Value {
    let items: Vec<Value> = value.try_iter().into_iter().flatten().map(change).collect();
    if value.is_tuple() { Value::from(Tuple::from(items)) } else { Value::from(items) }
}
