//! A vocabulary as grammars see it.

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

/// A longer token has no place in the tree: it is never allowed.
const LONGEST_TOKEN: usize = 1000;

/// More text than the tree of any vocabulary can hold.
const MOST_TEXT: usize = 4 << 20;

/// Which of the library's subsets of the vocabulary get trees of their own: texts without quotes, up to ten characters and
/// of any length. Inside a JSON string these are allowed at one stroke. More subsets would save little time.
const SLICES: [usize; 2] = [1, 3];

/// Trees in all: that of the vocabulary, and eight for the subsets and what is outside them.
const TREES: u64 = 9;

/// States of grammars that memory is set aside for.
const STATES: u64 = 32 << 20;

/// What a vocabulary of so many tokens and the states of some grammars are likely to take, before either is known.
pub(crate) fn likely_bytes(vocab: u64) -> u64 {
    // Tokens have about eight bytes, and a tree about two nodes for each.
    all_bytes(vocab, 8 * vocab, 2 * vocab) + STATES
}

/// What the tree of a vocabulary and those of all subsets take, at most.
fn all_bytes(vocab: u64, text: u64, nodes: u64) -> u64 {
    TREES * (vocab * 12 + text + nodes.next_power_of_two() * 8)
}

/// All tokens by their bytes, in trees that grammars are matched against.
pub(crate) struct Lexicon {
    factory: ParserFactory,
    /// See [`alone`](Self::alone).
    compiling: Mutex<()>,
}

/// The tree of a vocabulary, before its subsets have theirs.
pub(crate) struct Tree(TokTrie);

impl Tree {
    /// The tree of a vocabulary for `vocab` logits.
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

    /// What it and the trees of all subsets take, at most.
    pub fn all_bytes(&self) -> u64 {
        let vocab = self.0.vocab_size() as u64;
        let text: u64 = (0..vocab as u32).map(|id| self.0.token(id).len() as u64).sum();
        all_bytes(vocab, text, self.0.root().subtree_size() as u64)
    }
}

impl Lexicon {
    /// Makes the trees of the subsets.
    ///
    /// # Errors
    /// None that is known.
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
            // About a kilobyte each, counted as they come.
            max_lexer_states: 100_000,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Lexicon { factory, compiling: Mutex::new(()) })
    }

    /// Held while a grammar is compiled, which takes many times the grammar's size: that memory is needed once, however many
    /// wait.
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

/// What a token is to a grammar. Control and end tokens are no text: they have a mark that no text has. Bytes that are part of
/// no character have the same mark, so they are nothing.
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
