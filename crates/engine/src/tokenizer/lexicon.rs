//! The vocabulary in the form that grammars use.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie,
};
use llguidance::{ParserFactory, TokenParser};

use crate::TokenId;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// The longest token in the tree, in bytes. A longer one is never allowed in a grammar.
const LONGEST_TOKEN: usize = 1000;

/// More text than the tree of any real vocabulary has.
const MOST_TEXT: usize = 4 << 20;

/// The library's subsets of the vocabulary that get their own trees: texts without quotes, of up to ten characters and
/// of any length. Inside a JSON string all of a subset is allowed at once. More subsets would save little time.
const SLICES: [usize; 2] = [1, 3];

/// The number of trees: one of the vocabulary, and eight of the subsets and their complements.
const TREES: u64 = 9;

/// Memory reserved for states of grammars, in bytes.
const STATES: u64 = 32 << 20;

/// An estimate of the memory for a vocabulary of `vocab` tokens and the states of some grammars, before either is
/// known.
pub(crate) fn likely_bytes(vocab: u64) -> u64 {
    // Tokens have about eight bytes, and a tree about two nodes per token.
    all_bytes(vocab, 8 * vocab, 2 * vocab) + STATES
}

/// The most memory for the tree of a vocabulary and those of all subsets.
fn all_bytes(vocab: u64, text: u64, nodes: u64) -> u64 {
    TREES * (vocab * 12 + text + nodes.next_power_of_two() * 8)
}

/// All tokens by their bytes, in the trees that grammars are matched against.
pub(crate) struct Lexicon {
    factory: ParserFactory,
    /// See [`alone`](Self::alone).
    compiling: Mutex<()>,
}

/// The tree of a vocabulary, before the subsets have theirs.
pub(crate) struct Tree(TokTrie);

impl Tree {
    /// The tree of a vocabulary whose model has `vocab` logits.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the vocabulary is too large.
    pub fn new(tokenizer: &Tokenizer, vocab: usize) -> Result<Tree> {
        let words: Vec<Vec<u8>> = (0..vocab as u32).map(|id| word(tokenizer, TokenId(id))).collect();
        let text: usize = words.iter().map(Vec::len).sum();
        if text >= MOST_TEXT || vocab >= 1 << 24 {
            return Err(Error::Unsupported(format!(
                "the vocabulary of {vocab} tokens and {text} bytes is too large for grammars"
            )));
        }
        let ends: Vec<u32> = tokenizer.end_tokens().iter().map(|end| end.0).collect();
        let first = ends.first().copied().unwrap_or(INVALID_TOKEN);
        let trie = TokTrie::from(&TokRxInfo::new(vocab as u32, first), &words);
        Ok(Tree(if ends.is_empty() { trie } else { trie.with_eos_tokens(&ends) }))
    }

    /// The most memory for this tree and those of all subsets.
    pub fn all_bytes(&self) -> u64 {
        let vocab = self.0.vocab_size() as u64;
        let text: u64 = (0..vocab as u32).map(|id| self.0.token(id).len() as u64).sum();
        all_bytes(vocab, text, self.0.root().subtree_size() as u64)
    }
}

impl Lexicon {
    /// Builds the trees of the subsets.
    ///
    /// # Errors
    /// None is known.
    pub fn new(tree: Tree) -> Result<Lexicon> {
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(tree.0));
        let all = SlicedBiasComputer::json_slices();
        let slices = SLICES.map(|i| all[i].clone());
        let mut factory =
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(|error| {
                Error::Backend(format!("cannot prepare the vocabulary for grammars: {error}"))
            })?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            // About a kilobyte each, counted when created.
            max_lexer_states: 100_000,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Lexicon { factory, compiling: Mutex::new(()) })
    }

    /// Locks compilation. Compiling a grammar takes many times the grammar's size; one compilation at a time needs
    /// that memory once.
    pub fn alone(&self) -> MutexGuard<'_, ()> {
        self.compiling.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles a grammar; the error is the library's message.
    pub fn parser(&self, grammar: TopLevelGrammar) -> std::result::Result<TokenParser, String> {
        let parser = catch_unwind(AssertUnwindSafe(|| {
            let mut parser = self.factory.create_parser(grammar)?;
            parser.start_without_prompt();
            Ok(parser)
        }));
        parser.map_err(|error| format!("{error:#}"))
    }
}

/// The bytes of a token in a grammar. Control and end tokens are not text: they start with a mark that no text
/// contains. Bytes that are not part of a character start with the same mark, so they match nothing.
fn word(tokenizer: &Tokenizer, token: TokenId) -> Vec<u8> {
    const MARK: u8 = TokTrie::SPECIAL_TOKEN_MARKER;
    let bytes = tokenizer.token_bytes(token);
    if bytes.len() > LONGEST_TOKEN || bytes.is_empty() {
        Vec::new()
    } else if tokenizer.is_control(token) || tokenizer.end_tokens().contains(&token) {
        [&[MARK], bytes].concat()
    } else if bytes[0] == MARK {
        Vec::new()
    } else {
        bytes.to_vec()
    }
}
