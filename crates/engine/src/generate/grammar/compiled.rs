//! Grammars, compiled with llguidance.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::api::{StopReason, TopLevelGrammar};
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::SimpleVob;
use llguidance::{JsonCompileOptions, TokenParser};
use serde_json::{Value, json};

use super::schema;
use crate::TokenId;
use crate::chat::dialect::WHITESPACE;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::memory::{Hold, Purpose};
use crate::tokenizer::lexicon::Lexicon;

/// Longer grammars are refused. Their rules may refer to each other in a long chain, which takes stack.
const MOST_SOURCE: usize = 256 << 10;

/// Enough for the deepest grammar that is accepted: parts of its compilation are recursive.
const COMPILER_STACK: usize = 64 << 20;

/// The most bytes of memory that compilation needs for each byte of a grammar: a schema of patterns needs 240.
const COMPILING: u64 = 256;

/// A matcher's memory is counted in steps of this size, which also covers what it needs besides its tables.
const STEP: u64 = 256 << 10;

/// What an answer must satisfy. It is compiled and checked once per request; clones share it.
///
/// # Examples
/// ```
/// use forebay_engine::{Grammar, Request};
/// use serde_json::json;
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// let prompt = engine.tokenizer().encode("An animal: ", Default::default())?;
/// let mut request = Request::new(&engine, prompt)?.max_tokens(8);
/// request.grammar = Some(Grammar::json_schema(&engine, &json!({ "enum": ["cat", "dog"] }))?);
/// let answer = engine.session().generate(&request, &mut |_| ())?;
/// assert!(["\"cat\"", "\"dog\""].contains(&&*answer.text));
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone)]
pub struct Grammar(Arc<Compiled>);

struct Compiled {
    engine: Engine,
    /// At the beginning of an answer.
    parser: TokenParser,
    hold: Hold,
}

impl Grammar {
    /// Any JSON object.
    ///
    /// # Errors
    /// [`Error::Budget`] if there is not enough memory.
    pub fn json_object(engine: &Engine) -> Result<Grammar> {
        Grammar::json_schema(engine, &json!({ "type": "object" }))
    }

    /// JSON that satisfies a schema. Fields come in the order of the schema.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the schema is invalid or uses something unsupported; the message names the place.
    pub fn json_schema(engine: &Engine, schema: &Value) -> Result<Grammar> {
        schema::check(schema)?;
        let lexicon = engine.lexicon()?;
        let _alone = lexicon.alone();
        let _compiling = hold_for_compiling(engine, schema.to_string().len())?;
        let parser = compile_schema(&lexicon, schema).map_err(|message| {
            schema::refusal(schema, &message, |part| compile_schema(&lexicon, part).err())
        })?;
        Grammar::new(engine, parser)
    }

    /// Text that matches a Lark grammar, in llguidance's variant. A control token is written as its text if that is in
    /// angle brackets, otherwise as its number: `<|im_start|>`, `<[17]>`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the grammar is invalid; the message names the place.
    pub fn lark(engine: &Engine, source: &str) -> Result<Grammar> {
        if source.len() > MOST_SOURCE {
            let message = format!("the grammar has {} bytes, more than {MOST_SOURCE}", source.len());
            return Err(Error::Invalid(message));
        }
        if source.contains("allow_invalid_utf8") {
            return Err(Error::Invalid("the grammar asks for allow_invalid_utf8: answers are text".into()));
        }
        schema::embedded(source).try_for_each(|schema| schema::check(&schema))?;
        let lexicon = engine.lexicon()?;
        let _alone = lexicon.alone();
        let _compiling = hold_for_compiling(engine, source.len())?;
        let plain = schema::without_embedded_annotations(source);
        let parser = compile(&lexicon, TopLevelGrammar::from_lark(plain)).map_err(|message| {
            // If a schema inside the grammar is wrong, its error is more precise.
            let wrong = schema::embedded(source).find_map(|schema| {
                let error = |part: &Value| compile_schema(&lexicon, part).err();
                error(&schema).map(|message| schema::refusal(&schema, &message, error))
            });
            wrong.unwrap_or_else(|| Error::Invalid(format!("the grammar: {message}")))
        })?;
        Grammar::new(engine, parser)
    }

    fn new(engine: &Engine, parser: TokenParser) -> Result<Grammar> {
        let mut hold = Hold::none(engine.ledger(), Purpose::Grammars);
        hold.resize(memory(&parser))?;
        let grammar = Grammar(Arc::new(Compiled { engine: engine.clone(), parser, hold }));
        // Some grammars match no text. That shows only when the first token is looked for.
        match grammar.matcher()?.allowed() {
            Ok(_) => Ok(grammar),
            Err(Error::Invalid(_)) => Err(Error::Invalid("no text can be what the grammar demands".into())),
            Err(error) => Err(error),
        }
    }

    /// A matcher at the beginning of an answer. Matchers share no mutable state.
    pub(crate) fn matcher(&self) -> Result<Matcher> {
        let Compiled { engine, parser, .. } = &*self.0;
        let mut hold = Hold::none(engine.ledger(), Purpose::Matchers);
        hold.resize(memory(parser))?;
        Ok(Matcher { parser: parser.deep_clone(), hold, ends: engine.tokenizer().end_tokens().to_vec() })
    }

    /// Bytes of the grammar, and of a new matcher.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.hold.bytes()
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammar")
    }
}

/// The state of one answer within a grammar.
pub(crate) struct Matcher {
    parser: TokenParser,
    hold: Hold,
    ends: Vec<TokenId>,
}

impl Matcher {
    /// Bytes that the matcher needs, whether or not they are reserved.
    pub fn bytes(&self) -> u64 {
        memory(&self.parser)
    }

    /// The tokens that may come next; `None` if only the end may.
    ///
    /// # Errors
    /// If no token can come next, or the grammar is too complex.
    pub fn allowed(&mut self) -> Result<Option<Mask>> {
        let parser = &mut self.parser;
        let mask = match catch_unwind(AssertUnwindSafe(|| parser.compute_mask())) {
            Ok(mask) => mask,
            // A model without an end token has no token left at the end.
            Err(_) if parser.stop_reason() == StopReason::NoExtensionBias && parser.is_accepting() => {
                return Ok(None);
            }
            Err(error) => return Err(failure(parser, &error.to_string())),
        };
        self.hold.resize(memory(&self.parser))?;
        let ends = self.ends.iter().filter(|end| mask.is_allowed(end.0)).count();
        Ok((mask.num_set() > ends).then_some(Mask(mask)))
    }

    /// Adds the next token, which must be allowed. Returns true if only the end may follow.
    ///
    /// # Errors
    /// If the grammar is too complex.
    pub fn accept(&mut self, token: TokenId) -> Result<bool> {
        let parser = &mut self.parser;
        catch_unwind(AssertUnwindSafe(|| {
            parser.consume_token(token.0)?;
            parser.check_stop()
        }))
        .map_err(|error| failure(&self.parser, &error.to_string()))
    }
}

/// A set of allowed tokens.
pub(crate) struct Mask(SimpleVob);

impl Mask {
    /// One bit for each token, lowest bit first.
    pub fn bits(&self) -> &[u32] {
        self.0.as_slice()
    }

    /// Whether a token is allowed.
    pub fn allows(&self, token: TokenId) -> bool {
        self.0.is_allowed(token.0)
    }
}

/// Bytes that a parser uses, rounded up: its tables so far, and the rest.
fn memory(parser: &TokenParser) -> u64 {
    (parser.parser.lexer_stats().num_bytes as u64 + STEP).next_multiple_of(STEP)
}

/// The error for a parser that cannot continue.
fn failure(parser: &TokenParser, message: &str) -> Error {
    let message = first_words(message);
    match parser.stop_reason() {
        StopReason::NoExtensionBias => {
            let text = String::from_utf8_lossy(parser.final_bytes());
            let end: String = text.chars().skip(text.chars().count().saturating_sub(40)).collect();
            Error::Invalid(format!(
                "no token of the model continues the grammar after {end:?}: change the grammar"
            ))
        }
        StopReason::LexerTooComplex | StopReason::ParserTooComplex => {
            Error::Invalid(format!("the grammar is too complex ({message}): make it simpler"))
        }
        _ => Error::Backend(format!("the grammar failed: {message}")),
    }
}

/// Reserves memory for compiling a grammar of this many bytes.
fn hold_for_compiling(engine: &Engine, bytes: usize) -> Result<Hold> {
    let mut hold = Hold::none(engine.ledger(), Purpose::Compiling);
    hold.resize(bytes as u64 * COMPILING)?;
    Ok(hold)
}

/// Compiles on a thread with enough stack.
fn compile(lexicon: &Lexicon, grammar: TopLevelGrammar) -> std::result::Result<TokenParser, String> {
    std::thread::scope(|scope| {
        let compiler = std::thread::Builder::new().name("grammar".into()).stack_size(COMPILER_STACK);
        let work = move || lexicon.parser(grammar).map_err(|message| first_words(&message));
        match compiler.spawn_scoped(scope, work) {
            Ok(thread) => thread.join().unwrap_or_else(|_| Err("it cannot be compiled".into())),
            Err(error) => Err(format!("no thread to compile it: {error}")),
        }
    })
}

fn compile_schema(lexicon: &Lexicon, schema: &Value) -> std::result::Result<TokenParser, String> {
    let mut schema = schema::object(schema);
    let options = JsonCompileOptions { whitespace_pattern: Some(WHITESPACE.into()), ..Default::default() };
    options.apply_to(&mut schema);
    compile(lexicon, TopLevelGrammar::from_json_schema(schema))
}

/// The part of a message that helps a user, without the parser's internals.
fn first_words(message: &str) -> String {
    let message = message.split("\n<").next().unwrap_or_default().trim();
    match message.strip_prefix("panic: ") {
        Some(reason) => format!("it cannot be compiled ({reason})"),
        None => message.to_owned(),
    }
}
