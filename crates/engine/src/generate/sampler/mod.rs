//! Sampling: from logits to the next token.
//!
//! The steps, in this order:
//!
//! 1. logit bias: added to the logits of the listed tokens;
//! 2. penalties: repetition, then frequency and presence, on tokens that occurred before;
//! 3. grammar: only the tokens that may come next stay;
//! 4. temperature: logits are divided by it; at 0 the highest logit wins, and nothing below applies;
//! 5. top-k: the `top_k` likeliest tokens stay;
//! 6. top-p: the likeliest tokens stay, as few as together hold `top_p` of the probability;
//! 7. min-p: tokens at least `min_p` times as likely as the likeliest one stay;
//! 8. one draw among those that are left, in proportion to their probability.
//!
//! Of two tokens with equal logits the one with the lower number counts as the likelier, everywhere. Sums run in
//! f64 in an order that the logits determine, and the exponential is our own, so a seed gives the same tokens
//! for the same logits on every platform.

mod history;
mod params;
mod scores;
#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::f64::consts::LOG2_E;
use std::hash::{BuildHasher, RandomState};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::TokenId;
use crate::backend::{Best, Logits};
use crate::backend::{Ranked, rank, rank_buffer, tame};
use crate::error::{Error, Result};
use history::{Count, History, Origin};

pub use params::{SamplingOverrides, SamplingParams};
pub use scores::Scored;
pub(crate) use scores::Scorer;

/// A margin larger than the rounding errors of exponentials, for comparing weights with a bound.
const LEEWAY: f64 = 1.0 - 1e-9;

/// Chooses tokens for one conversation: the parameters, the random numbers and the tokens seen so far.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    seed: u64,
    rng: ChaCha8Rng,
    history: History,
    vocab_size: usize,
    /// The logits with bias and penalties, `[vocab_size]`, each made [`tame`]. Reused from token to token.
    logits: Vec<f32>,
    /// The likeliest of them. Reused from token to token.
    ranked: Vec<Ranked>,
    /// The tokens that have passed the filters so far. Reused from token to token.
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// A sampler for logits of `vocab_size` tokens; fails if the parameters are out of range.
    pub fn new(mut params: SamplingParams, vocab_size: usize) -> Result<Sampler> {
        params.validate()?;
        if vocab_size == 0 || u32::try_from(vocab_size).is_err() {
            return Err(Error::Invalid(format!(
                "the vocabulary has {vocab_size} tokens, but must have 1 to {}",
                u32::MAX
            )));
        }
        if let Some((token, _)) = params.logit_bias.iter().find(|(t, _)| t.0 as usize >= vocab_size) {
            return Err(Error::Invalid(format!(
                "logit_bias names token {}, but the vocabulary ends at {}",
                token.0,
                vocab_size - 1
            )));
        }
        params.merge_bias();
        let seed = params.seed.unwrap_or_else(random_seed);
        let window = if params.has_penalties() { params.penalty_last_n } else { 0 };
        let most_candidates = if params.top_k == 0 { vocab_size } else { params.top_k.min(vocab_size) };
        Ok(Sampler {
            seed,
            rng: ChaCha8Rng::seed_from_u64(seed),
            history: History::new(window),
            vocab_size,
            logits: Vec::with_capacity(vocab_size),
            ranked: Vec::with_capacity(rank_buffer(params.top_k).min(vocab_size)),
            candidates: Vec::with_capacity(most_candidates),
            params,
        })
    }

    /// The seed in use: the given one, or a random one. Setting it again repeats the run.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The parameters in use.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Records tokens of the prompt. They count for the repetition penalty, but not for the presence and frequency
    /// penalties.
    pub fn accept_prompt(&mut self, tokens: &[TokenId]) {
        for &token in tokens {
            self.history.push(token, Origin::Prompt);
        }
    }

    /// Records a token of the answer: it counts for all penalties. [`sample`](Self::sample) does not do this by
    /// itself, because the caller may reject the token.
    pub fn accept(&mut self, token: TokenId) {
        self.history.push(token, Origin::Answer);
    }

    /// Chooses the next token from the logits of the whole vocabulary.
    ///
    /// A NaN counts as minus infinity; a token whose logit is minus infinity is never chosen. Fails if no other
    /// is left. Takes exactly one random number per token, or none at temperature 0.
    pub fn sample(&mut self, logits: &[f32]) -> Result<TokenId> {
        self.sample_among(logits, None)
    }

    /// Like [`sample_among`](Self::sample_among), but reads only the likeliest tokens if they determine the choice. The
    /// token is the same.
    pub(crate) fn choose(&mut self, logits: &mut Logits<'_>, allowed: Option<&[u32]>) -> Result<TokenId> {
        let count = logits.count();
        let chosen = match logits.best()? {
            Some(best) if count == self.vocab_size => self.sample_best(best, allowed),
            _ => None,
        };
        match chosen {
            Some(token) => Ok(token),
            None => self.sample_among(logits.all()?, allowed),
        }
    }

    /// Chooses from the likeliest tokens, if they determine the choice.
    fn sample_best(&mut self, best: Best<'_>, allowed: Option<&[u32]>) -> Option<TokenId> {
        // Otherwise a raised token outside the list could win.
        if !self.params.only_lowers() {
            return None;
        }
        // A candidate that is not above all other tokens may rank below one of them.
        let decides = |c: &Candidate| c.logit > best.others;
        self.candidates.clear();
        self.candidates.extend(best.ranked.iter().map(|&Ranked { token, logit }| Candidate {
            token,
            logit,
            weight: 0.0,
        }));
        // The candidates are ranked. A bias lookup and a draw from all tokens need them by token number.
        let draws_from_all = self.params.temperature > 0.0 && self.params.top_k == 0;
        if draws_from_all || !self.params.logit_bias.is_empty() {
            self.candidates.sort_unstable_by_key(|c| c.token);
        }
        self.lower_candidates();
        self.candidates.retain(|c| {
            let bits = |allowed: &[u32]| allowed.get(c.token as usize / 32).copied().unwrap_or(0);
            let may = allowed.is_none_or(|allowed| bits(allowed) >> (c.token % 32) & 1 == 1);
            may && c.logit > f32::NEG_INFINITY
        });
        let first = *self.candidates.iter().min_by(|a, b| a.by_rank(b)).filter(|c| decides(c))?;
        if self.params.temperature == 0.0 {
            return Some(TokenId(first.token));
        }
        let (k, all) = (self.params.top_k, best.others == f32::NEG_INFINITY);
        if k > 0 {
            self.candidates.sort_unstable_by(Candidate::by_rank);
            self.candidates.truncate(k);
            if !all && !self.candidates.get(k - 1).is_some_and(decides) {
                return None;
            }
        } else if !all {
            // Any number of unlisted tokens could pass min-p.
            let unlikely = self.weight(best.others, first.logit) < LEEWAY * f64::from(self.params.min_p);
            if self.params.top_p < 1.0 || !unlikely {
                return None;
            }
        }
        Some(self.draw_filtered(first.logit))
    }

    /// Applies bias and penalties to the candidates, which are sorted by token if there is a bias.
    fn lower_candidates(&mut self) {
        let candidates = &mut self.candidates;
        for &(token, bias) in &self.params.logit_bias {
            if let Ok(i) = candidates.binary_search_by_key(&token.0, |c| c.token) {
                candidates[i].logit = tame(candidates[i].logit + bias);
            }
        }
        for c in candidates {
            if let Some(count) = self.history.count(TokenId(c.token)) {
                c.logit = penalised(&self.params, c.logit, count);
            }
        }
    }

    /// Chooses among the tokens whose bits are set, lowest bit first. All other tokens count as minus infinity.
    pub fn sample_among(&mut self, logits: &[f32], allowed: Option<&[u32]>) -> Result<TokenId> {
        if logits.len() != self.vocab_size {
            return Err(Error::Invalid(format!(
                "{} logits for a vocabulary of {} tokens",
                logits.len(),
                self.vocab_size
            )));
        }
        self.logits.clear();
        self.logits.extend(logits.iter().map(|&l| tame(l)));
        self.apply_bias();
        self.apply_penalties();
        if let Some(allowed) = allowed {
            self.forbid_others(allowed);
        }

        let best = self.logits.iter().fold(f32::NEG_INFINITY, |best, &l| if l > best { l } else { best });
        if best == f32::NEG_INFINITY {
            return Err(match allowed {
                None => Error::Backend("no token can be chosen: the model produced no finite logits".into()),
                Some(_) => Error::Invalid(
                    "no token can be chosen: logit_bias or the model excludes every token that the grammar allows"
                        .into(),
                ),
            });
        }
        if self.params.temperature == 0.0 {
            let first = self.logits.iter().position(|&l| l == best).unwrap_or_default();
            return Ok(TokenId(first as u32));
        }
        // A temperature does not change the order, so top-k may come first and save most exponentials.
        self.keep_top_k();
        Ok(self.draw_filtered(best))
    }

    /// Applies the steps that follow top-k to the candidates, and draws one.
    fn draw_filtered(&mut self, best: f32) -> TokenId {
        self.apply_temperature(best);
        self.keep_top_p();
        self.keep_min_p();
        self.draw()
    }

    fn apply_bias(&mut self) {
        for &(token, bias) in &self.params.logit_bias {
            let logit = &mut self.logits[token.0 as usize];
            *logit = tame(*logit + bias);
        }
    }

    /// The order of the history's tokens does not matter, because each changes only its own logit.
    fn apply_penalties(&mut self) {
        for (token, count) in self.history.counts() {
            if let Some(logit) = self.logits.get_mut(token.0 as usize) {
                *logit = penalised(&self.params, *logit, count);
            }
        }
    }

    fn forbid_others(&mut self, allowed: &[u32]) {
        for (i, logits) in self.logits.chunks_mut(u32::BITS as usize).enumerate() {
            match allowed.get(i).copied().unwrap_or(0) {
                0 => logits.fill(f32::NEG_INFINITY),
                u32::MAX => {}
                word => {
                    for (bit, logit) in logits.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    }

    /// Collects the candidates in an order that the logits determine: by rank, or by number without a top-k.
    fn keep_top_k(&mut self) {
        let k = self.params.top_k;
        self.candidates.clear();
        if k == 0 {
            let possible = (0..).zip(&self.logits).filter(|(_, logit)| **logit > f32::NEG_INFINITY);
            self.candidates.extend(possible.map(|(token, &logit)| Candidate { token, logit, weight: 0.0 }));
        } else {
            rank(&self.logits, k, &mut self.ranked);
            let ranked = self.ranked.iter();
            self.candidates.extend(ranked.map(|&Ranked { token, logit }| Candidate {
                token,
                logit,
                weight: 0.0,
            }));
        }
    }

    /// Weights are relative to the best candidate's, which is 1.
    fn apply_temperature(&mut self, best: f32) {
        for i in 0..self.candidates.len() {
            self.candidates[i].weight = self.weight(self.candidates[i].logit, best);
        }
    }

    fn weight(&self, logit: f32, best: f32) -> f64 {
        exp((f64::from(logit) - f64::from(best)) / f64::from(self.params.temperature))
    }

    fn keep_top_p(&mut self) {
        let top_p = f64::from(self.params.top_p);
        if top_p >= 1.0 {
            return;
        }
        let wanted = top_p * self.total();
        let mut mass = 0.0;
        // The result is mostly a tiny part of the vocabulary, so only the part that is needed gets sorted.
        let mut sorted = 0;
        for i in 0..self.candidates.len() {
            if i == sorted {
                sorted = sort_more(&mut self.candidates, sorted);
            }
            mass += self.candidates[i].weight;
            if mass >= wanted {
                self.candidates.truncate(i + 1);
                return;
            }
        }
    }

    fn keep_min_p(&mut self) {
        let min_p = f64::from(self.params.min_p);
        self.candidates.retain(|c| c.weight >= min_p);
    }

    fn draw(&mut self) -> TokenId {
        // 53 bits: the uniform numbers in [0, 1) that an f64 holds exactly.
        let uniform = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        let target = uniform * self.total();
        let mut mass = 0.0;
        for c in &self.candidates {
            mass += c.weight;
            if target < mass {
                return TokenId(c.token);
            }
        }
        // The loop adds the same numbers in the same order as the total, which exceeds the target.
        unreachable!("the weights sum to {mass}, and the target {target} is below their total")
    }

    /// Uses a fold because `sum` may add in any order.
    fn total(&self) -> f64 {
        self.candidates.iter().fold(0.0, |sum, c| sum + c.weight)
    }
}

/// A token that may be chosen.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: u32,
    logit: f32,
    /// The probability up to a common factor, once the temperature is applied.
    weight: f64,
}

impl Candidate {
    /// The likelier first; of equals, the lower number.
    fn by_rank(&self, other: &Candidate) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.token.cmp(&other.token))
    }
}

/// A logit after the penalties for a token that occurred `count` times.
fn penalised(params: &SamplingParams, logit: f32, count: Count) -> f32 {
    let mut l = if logit > 0.0 { logit / params.repeat_penalty } else { logit * params.repeat_penalty };
    if count.answer > 0 {
        l -= count.answer as f32 * params.frequency_penalty + params.presence_penalty;
    }
    tame(l)
}

/// Extends the sorted beginning of `candidates`, whose length is `sorted`; returns its new length.
fn sort_more(candidates: &mut [Candidate], sorted: usize) -> usize {
    let end = (sorted * 4).max(256).min(candidates.len());
    let rest = &mut candidates[sorted..];
    let more = end - sorted;
    if more < rest.len() {
        rest.select_nth_unstable_by(more, Candidate::by_rank);
    }
    rest[..more].sort_unstable_by(Candidate::by_rank);
    end
}

/// eˣ for x ≤ 0, within a few units of the last place.
///
/// The C library's function rounds differently from platform to platform; this one is made of operations that
/// IEEE 754 defines to the bit.
fn exp(x: f64) -> f64 {
    // 1/n!, for the Taylor series, which converges to the last place within ln(2)/2 of zero.
    const TERMS: [f64; 14] = {
        let mut terms = [1.0; 14];
        let mut n = 1;
        while n < terms.len() {
            terms[n] = terms[n - 1] / n as f64;
            n += 1;
        }
        terms
    };
    // ln(2) in two parts; the first has so many trailing zeros that its products below are exact.
    const LN2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
    const LN2_LOW: f64 = f64::from_bits(0x3dea_39ef_3579_3c76);

    // Adding this to a number below 2⁵¹ rounds it to an integer, which the low bits of the sum then hold.
    const ROUND: f64 = 1.5 * (1u64 << 52) as f64;
    // Below this the result is subnormal: too small a weight to ever be drawn.
    const LOWEST: f64 = -708.0;

    // x = k·ln(2) + r; no branch anywhere, so that neighbouring calls overlap.
    let sum = x.max(LOWEST) * LOG2_E + ROUND;
    let k = sum - ROUND;
    let r = (x.max(LOWEST) - k * LN2_HIGH) - k * LN2_LOW;
    let series = TERMS.iter().rev().fold(0.0, |sum, term| sum * r + term);
    let power = f64::from_bits(sum.to_bits().wrapping_add(1023) << 52);
    if x < LOWEST { 0.0 } else { series * power }
}

/// A random seed from the operating system, through the standard library's hash keys. It has 32 bits, so that it is
/// quick to type and exact as a JSON number.
fn random_seed() -> u64 {
    RandomState::new().hash_one(()) >> 32
}
