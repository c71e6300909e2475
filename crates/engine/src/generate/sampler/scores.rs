//! The model's own probabilities of tokens.

use std::f64::consts::SQRT_2;

use super::exp;
use crate::TokenId;
use crate::backend::{Ranked, rank, tame};

/// A token of an answer and its probability. Probabilities are the model's own, before temperature, bias, penalties and
/// grammar, as natural logarithms.
///
/// # Examples
/// ```
/// use forebay_engine::Request;
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
/// let request = Request::new(&engine, prompt)?.max_tokens(4).logprobs(3);
/// let answer = engine.session().generate(&request, &mut |_| ())?;
/// for scored in &answer.logprobs {
///     let percent = 100.0 * scored.logprob.exp();
///     println!("{:?}: {percent:.1} %", engine.tokenizer().token_text(scored.token));
///     assert_eq!(scored.top.len(), 3);
/// }
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// The token.
    pub token: TokenId,
    /// Its log probability.
    pub logprob: f32,
    /// The likeliest tokens at this position, likeliest first; of equals, the lower number first.
    pub top: Vec<(TokenId, f32)>,
}

/// Computes probabilities. Sums run in f64 in the order of the vocabulary, with operations that IEEE 754 defines to the
/// bit. So the same logits give the same numbers on every platform.
#[derive(Clone, Debug)]
pub(crate) struct Scorer {
    /// How many of the likeliest tokens are reported.
    top: usize,
    /// `[vocab]`, each [`tame`]. Reused for every token.
    logits: Vec<f32>,
    ranked: Vec<Ranked>,
}

impl Scorer {
    pub fn new(top: usize) -> Scorer {
        Scorer { top, logits: Vec::new(), ranked: Vec::new() }
    }

    /// The probability of a token, and the likeliest tokens. The token must be one that can be chosen, so that at least
    /// one logit is finite.
    pub fn score(&mut self, logits: &[f32], token: TokenId) -> Scored {
        self.logits.clear();
        self.logits.extend(logits.iter().map(|&l| tame(l)));
        let best = self.logits.iter().fold(f32::NEG_INFINITY, |best, &l| best.max(l));
        let below = |logit: f32| f64::from(logit) - f64::from(best);
        let total = ln(self.logits.iter().fold(0.0, |sum, &l| sum + exp(below(l))));
        // JSON has no infinity.
        let logprob = |logit: f32| ((below(logit) - total) as f32).max(f32::MIN);
        rank(&self.logits, self.top, &mut self.ranked);
        Scored {
            token,
            logprob: logprob(self.logits[token.0 as usize]),
            top: self.ranked.iter().map(|c| (TokenId(c.token), logprob(c.logit))).collect(),
        }
    }
}

/// The natural logarithm of a finite number of at least 1, within a few units in the last place. The C library's
/// function rounds differently from platform to platform.
fn ln(x: f64) -> f64 {
    const LN2: f64 = std::f64::consts::LN_2;
    // x = m·2ᵏ with m near 1.
    let bits = x.to_bits();
    let mut k = (bits >> 52) as f64 - 1023.0;
    let mut m = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if m > SQRT_2 {
        m /= 2.0;
        k += 1.0;
    }
    // ln m = 2·(s + s³/3 + s⁵/5 + …), where s is below 0.172.
    let s = (m - 1.0) / (m + 1.0);
    let square = s * s;
    let series = (0..12).rev().fold(0.0, |sum, n| sum * square + 1.0 / f64::from(2 * n + 1));
    k * LN2 + 2.0 * s * series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_are_those_of_mathematics() {
        let mut x = 1.0;
        while x < 1e9 {
            let (ours, theirs) = (ln(x), f64::ln(x));
            assert!((ours - theirs).abs() <= 4e-16 * theirs.max(1.0), "ln {x} = {theirs}, not {ours}");
            x *= 1.000_37;
        }
        assert_eq!(ln(1.0), 0.0);
    }

    /// By `decimal` of Python, with 40 digits: ln(eˡ / Σ eˡ).
    #[test]
    fn probabilities_are_those_of_mathematics() {
        let logits = [1.0, -2.5, 3.25, 0.0, 3.25, -40.0, f32::NAN, f32::NEG_INFINITY];
        let expected = [-3.01423742, -6.51423742, -0.764237417, -4.01423742, -0.764237417, -44.0142374];
        for (id, expected) in (0u32..).zip(expected) {
            let scored = Scorer::new(0).score(&logits, TokenId(id));
            let error = (f64::from(scored.logprob) - expected).abs();
            assert!(error <= 1e-7 * f64::abs(expected), "{id}: {scored:?}");
            assert_eq!(scored.top, []);
        }
        let scored = Scorer::new(3).score(&logits, TokenId(3));
        let top: Vec<u32> = scored.top.iter().map(|(token, _)| token.0).collect();
        // Equal logits: the lower number first.
        assert_eq!(top, [2, 4, 0]);
        assert_eq!(scored.top[0].1, scored.top[1].1);
        assert_eq!(Scorer::new(100).score(&logits, TokenId(0)).top.len(), 6, "the impossible are not told");
    }

    #[test]
    fn extreme_logits_give_finite_numbers() {
        let scored = Scorer::new(2).score(&[f32::MAX, f32::MIN, f32::INFINITY], TokenId(1));
        assert_eq!(scored.logprob, f32::MIN);
        assert!(scored.top.iter().all(|(_, logprob)| logprob.is_finite()));
        let alone = Scorer::new(1).score(&[f32::NEG_INFINITY, 7.0], TokenId(1));
        assert_eq!((alone.logprob, alone.top[0]), (0.0, (TokenId(1), 0.0)));
    }
}
