//! The merging of byte pair encoding: the characters of a piece of text become tokens, and neighbours are merged in
//! the order of the vocabulary's merges.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use foldhash::fast::RandomState;
use smallvec::SmallVec;

use super::bpe::MergeRules;
use crate::TokenId;

/// The tokens of a vocabulary by their spelling.
pub(super) type Vocab = HashMap<String, u32, RandomState>;

/// A vocabulary and its merges.
#[derive(Debug)]
pub(super) struct Merger {
    words: Vocab,
    /// For two neighbours: the rank of their merge, and the token that they become.
    merges: HashMap<(u32, u32), Merge, RandomState>,
    /// The token of each byte, if bytes without a better token have tokens of their own.
    bytes: Option<Box<[Option<u32>; 256]>>,
    /// The token for characters without a token.
    unknown: Option<u32>,
    fuses_unknown: bool,
    ignores_merges: bool,
}

#[derive(Clone, Copy, Debug)]
struct Merge {
    rank: u32,
    becomes: u32,
}

/// A token during merging, in a list of neighbours.
#[derive(Clone, Copy)]
struct Symbol {
    token: u32,
    previous: usize,
    next: usize,
}

/// Marks the ends of the list, and a symbol that was merged into the one before it.
const NONE: usize = usize::MAX;

/// The tokens of most pieces fit without an allocation.
type Symbols = SmallVec<[Symbol; 32]>;

impl Merger {
    /// Builds the merger. All tokens of `merges` must be in the vocabulary.
    ///
    /// # Errors
    /// The reason, if a token is not in the vocabulary.
    pub(super) fn new<'a>(
        words: Vocab,
        merges: impl ExactSizeIterator<Item = (&'a str, &'a str)>,
        rules: &MergeRules,
    ) -> Result<Merger, String> {
        let unknown = match &rules.unknown {
            Some(unknown) => Some(
                *words
                    .get(unknown)
                    .ok_or_else(|| format!("the unknown token {unknown:?} is not in the vocabulary"))?,
            ),
            None => None,
        };
        let bytes = rules
            .byte_fallback
            .then(|| Box::new(std::array::from_fn(|byte| words.get(&format!("<0x{byte:02X}>")).copied())));
        let all = merges.len();
        let mut kept = HashMap::with_capacity_and_hasher(all, RandomState::default());
        let mut merged = String::new();
        let mut ignored = 0;
        for (rank, (left, right)) in (0..).zip(merges) {
            merged.clear();
            merged.extend([left, right]);
            // Reduced vocabularies keep merges of tokens that they no longer have. Such merges never apply.
            match (words.get(left), words.get(right), words.get(&merged)) {
                (Some(&left), Some(&right), Some(&becomes)) => {
                    kept.insert((left, right), Merge { rank, becomes });
                }
                _ => ignored += 1,
            }
        }
        if ignored > 0 {
            tracing::info!(
                "{ignored} of {all} merges refer to tokens outside the vocabulary and are ignored"
            );
        }
        Ok(Merger {
            words,
            merges: kept,
            bytes,
            unknown,
            fuses_unknown: rules.fuses_unknown,
            ignores_merges: rules.ignores_merges,
        })
    }

    /// Whether unspellable neighbours become one token. If every byte has a token, nothing is unspellable.
    pub(super) fn fuses_unknown(&self) -> bool {
        let spells_all = self.bytes.as_ref().is_some_and(|bytes| bytes.iter().all(Option::is_some));
        self.fuses_unknown && self.unknown.is_some() && !spells_all
    }

    /// The token with this spelling.
    pub(super) fn find(&self, word: &str) -> Option<u32> {
        self.words.get(word).copied()
    }

    /// Appends the tokens of a word. Characters without a token are left out; the result is whether there were none.
    pub(super) fn merge(&self, word: &str, tokens: &mut Vec<TokenId>) -> bool {
        if self.ignores_merges
            && let Some(token) = self.find(word)
        {
            tokens.push(TokenId(token));
            return true;
        }
        let mut symbols = Symbols::new();
        let whole = self.spell(word, &mut symbols);
        self.merge_symbols(&mut symbols);
        let mut at = if symbols.is_empty() { NONE } else { 0 };
        while at != NONE {
            tokens.push(TokenId(symbols[at].token));
            at = symbols[at].next;
        }
        whole
    }

    /// The tokens of a word's characters; returns whether every character has one.
    fn spell(&self, word: &str, symbols: &mut Symbols) -> bool {
        let mut whole = true;
        let mut after_unknown = false;
        let mut spelled = [0; 4];
        for c in word.chars() {
            let c: &str = c.encode_utf8(&mut spelled);
            let was_unknown = std::mem::take(&mut after_unknown);
            if let Some(token) = self.find(c) {
                push(symbols, token);
            } else if let Some(bytes) = self.bytes_of(c) {
                bytes.into_iter().for_each(|token| push(symbols, token));
            } else if let Some(unknown) = self.unknown {
                if !(was_unknown && self.fuses_unknown) {
                    push(symbols, unknown);
                }
                after_unknown = true;
            } else {
                whole = false;
            }
        }
        whole
    }

    /// The byte tokens of a character, if each of its bytes has one.
    fn bytes_of(&self, c: &str) -> Option<SmallVec<[u32; 4]>> {
        let bytes = self.bytes.as_ref()?;
        c.bytes().map(|byte| bytes[usize::from(byte)]).collect()
    }

    /// Merges neighbours, lowest rank first and leftmost first, until no merge applies.
    fn merge_symbols(&self, symbols: &mut Symbols) {
        // Candidates: rank, position of the left symbol, and the token that the two become.
        let mut queue = BinaryHeap::with_capacity(symbols.len());
        let candidate = |symbols: &Symbols, left: usize| {
            let right = symbols.get(symbols[left].next)?;
            let merge = self.merges.get(&(symbols[left].token, right.token))?;
            Some(Reverse((merge.rank, left, merge.becomes)))
        };
        queue.extend((0..symbols.len()).filter_map(|left| candidate(symbols, left)));
        while let Some(best) = queue.pop() {
            let Reverse((_, left, becomes)) = best;
            // One of the two may have been merged with another symbol since.
            if symbols[left].token == GONE || candidate(symbols, left) != Some(best) {
                continue;
            }
            let right = symbols[left].next;
            let after = symbols[right].next;
            symbols[right].token = GONE;
            symbols[left].token = becomes;
            symbols[left].next = after;
            if let Some(after) = symbols.get_mut(after) {
                after.previous = left;
            }
            queue.extend(candidate(symbols, left));
            if symbols[left].previous != NONE {
                queue.extend(candidate(symbols, symbols[left].previous));
            }
        }
    }
}

/// The token of a symbol that was merged into the one before it; vocabularies are far smaller.
const GONE: u32 = u32::MAX;

fn push(symbols: &mut Symbols, token: u32) {
    let here = symbols.len();
    let previous = here.checked_sub(1).unwrap_or(NONE);
    if let Some(previous) = symbols.last_mut() {
        previous.next = here;
    }
    symbols.push(Symbol { token, previous, next: NONE });
}

#[cfg(test)]
mod tests {
    use super::*;

    const MERGES: [(&str, &str); 5] = [("b", "c"), ("a", "b"), ("a", "bc"), ("a", "a"), ("aa", "aa")];

    fn merger(words: &[&str], rules: &MergeRules) -> Merger {
        let words: Vocab = (0..).zip(words).map(|(id, word)| ((*word).to_owned(), id)).collect();
        Merger::new(words, MERGES.into_iter(), rules).unwrap()
    }

    const WORDS: [&str; 9] = ["a", "b", "c", "bc", "ab", "abc", "aa", "aaaa", "?"];

    fn tokens(merger: &Merger, word: &str) -> (Vec<u32>, bool) {
        let mut tokens = Vec::new();
        let whole = merger.merge(word, &mut tokens);
        (tokens.into_iter().map(|token| token.0).collect(), whole)
    }

    #[test]
    fn the_lowest_rank_merges_first_and_then_the_leftmost() {
        let merger = merger(&WORDS, &MergeRules::default());
        // "bc" has a lower rank than "ab".
        assert_eq!(tokens(&merger, "abc"), (vec![5], true));
        assert_eq!(tokens(&merger, "abab"), (vec![4, 4], true));
        assert_eq!(tokens(&merger, "aaa"), (vec![6, 0], true));
        assert_eq!(tokens(&merger, "aaaaa"), (vec![7, 0], true));
        assert_eq!(tokens(&merger, ""), (vec![], true));
    }

    #[test]
    fn characters_without_a_token_are_left_out_and_reported() {
        let merger = merger(&WORDS, &MergeRules::default());
        assert_eq!(tokens(&merger, "axbc"), (vec![5], false));
        assert_eq!(tokens(&merger, "x"), (vec![], false));
    }

    #[test]
    fn unknown_neighbours_fuse_if_the_rules_say_so() {
        let mut rules = MergeRules { unknown: Some("?".to_owned()), ..MergeRules::default() };
        assert_eq!(tokens(&merger(&WORDS, &rules), "xxax"), (vec![8, 8, 0, 8], true));
        rules.fuses_unknown = true;
        assert_eq!(tokens(&merger(&WORDS, &rules), "xxax"), (vec![8, 0, 8], true));
        rules.unknown = Some("!".to_owned());
        let words: Vocab = [("a".to_owned(), 0)].into_iter().collect();
        assert!(Merger::new(words, MERGES.into_iter(), &rules).unwrap_err().contains("\"!\""));
    }

    #[test]
    fn characters_become_bytes_only_if_all_their_bytes_have_tokens() {
        let rules = MergeRules { byte_fallback: true, ..MergeRules::default() };
        let merger = merger(&["a", "<0xC3>", "<0xA9>"], &rules);
        assert_eq!(tokens(&merger, "aé"), (vec![0, 1, 2], true));
        // ê is C3 AA.
        assert_eq!(tokens(&merger, "aê"), (vec![0], false));
    }

    #[test]
    fn a_piece_that_is_a_token_may_skip_merging() {
        let words = ["a", "b", "aba"];
        assert_eq!(tokens(&merger(&words, &MergeRules::default()), "aba"), (vec![0, 1, 0], true));
        let rules = MergeRules { ignores_merges: true, ..MergeRules::default() };
        assert_eq!(tokens(&merger(&words, &rules), "aba"), (vec![2], true));
    }

    /// The heap gives what merging step by step gives, on words long enough for many stale candidates.
    #[test]
    fn merging_equals_its_definition() {
        let merger = merger(&WORDS, &MergeRules::default());
        let mut random = 12345_u32;
        for _ in 0..500 {
            let word: String = (0..40)
                .map(|_| {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    ['a', 'b', 'c'][(random >> 16) as usize % 3]
                })
                .collect();
            let mut plain: Vec<u32> = word.chars().map(|c| merger.find(&c.to_string()).unwrap()).collect();
            let best = |plain: &[u32]| {
                let pairs = plain.windows(2).enumerate();
                pairs
                    .filter_map(|(at, pair)| Some((merger.merges.get(&(pair[0], pair[1]))?, at)))
                    .min_by_key(|(merge, at)| (merge.rank, *at))
            };
            while let Some((merge, at)) = best(&plain) {
                plain.splice(at..at + 2, [merge.becomes]);
            }
            assert_eq!(tokens(&merger, &word).0, plain, "{word}");
        }
    }
}
