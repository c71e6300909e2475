//! The tokens that penalties apply to.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use crate::TokenId;

/// Who wrote a token.
#[derive(Clone, Copy, Debug)]
pub(super) enum Origin {
    Prompt,
    Answer,
}

/// How often a token occurs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    pub prompt: u32,
    pub answer: u32,
}

/// Windows up to this many tokens get their memory at once; longer ones as the conversation grows.
const MOST_RESERVED: usize = 4096;

/// The last tokens of a conversation, with a count of each.
#[derive(Clone, Debug)]
pub(super) struct History {
    window: usize,
    /// The oldest first, at most `window` of them.
    tokens: VecDeque<(TokenId, Origin)>,
    /// No entry is all zero.
    counts: HashMap<TokenId, Count>,
}

impl History {
    /// Remembers the last `window` tokens; with 0, none.
    pub fn new(window: usize) -> History {
        let room = window.min(MOST_RESERVED);
        // Twice the capacity: a hash table that is at most half full removes deleted entries in place, while a fuller
        // one reallocates.
        History { window, tokens: VecDeque::with_capacity(room), counts: HashMap::with_capacity(2 * room) }
    }

    pub fn push(&mut self, token: TokenId, origin: Origin) {
        if self.window == 0 {
            return;
        }
        if self.tokens.len() == self.window {
            self.forget_oldest();
        }
        self.tokens.push_back((token, origin));
        *self.counts.entry(token).or_default().of(origin) += 1;
    }

    /// Each token that occurs, with its count, in no particular order.
    pub fn counts(&self) -> impl Iterator<Item = (TokenId, Count)> {
        self.counts.iter().map(|(&token, &count)| (token, count))
    }

    /// How often a token occurs, if it does.
    pub fn count(&self, token: TokenId) -> Option<Count> {
        self.counts.get(&token).copied()
    }

    fn forget_oldest(&mut self) {
        let Some((token, origin)) = self.tokens.pop_front() else { return };
        if let Entry::Occupied(mut entry) = self.counts.entry(token) {
            *entry.get_mut().of(origin) -= 1;
            if *entry.get() == Count::default() {
                entry.remove();
            }
        }
    }
}

impl Count {
    fn of(&mut self, origin: Origin) -> &mut u32 {
        match origin {
            Origin::Prompt => &mut self.prompt,
            Origin::Answer => &mut self.answer,
        }
    }
}
