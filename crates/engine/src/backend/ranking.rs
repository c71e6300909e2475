//! Logits in order of rank.

use std::cmp::Ordering;

/// A token and its logit, which is [tame](tame).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ranked {
    /// The token.
    pub token: u32,
    /// Its logit.
    pub logit: f32,
}

impl Ranked {
    /// The likelier first; of equals, the lower number.
    pub fn by_rank(a: &Ranked, b: &Ranked) -> Ordering {
        b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
    }
}

/// A logit that can be compared and reckoned with: a NaN counts as minus infinity, plus infinity as the largest number,
/// minus zero as zero, with which it must tie.
pub fn tame(logit: f32) -> f32 {
    let logit = if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) };
    // Adding zero turns minus zero into zero.
    logit + 0.0
}

/// The `k` likeliest tokens, the likeliest first; fewer if others are impossible, which those of minus infinity are.
pub fn rank(logits: &[f32], k: usize, best: &mut Vec<Ranked>) {
    best.clear();
    if k == 0 {
        return;
    }
    // Whenever the buffer is full it shrinks to the best k, and the last of these is the mark to beat: a later token
    // with an equal logit ranks below it. Few logits ever get past the comparison, which no NaN does.
    let mut mark = f32::NEG_INFINITY;
    for (token, &logit) in (0..).zip(logits) {
        if logit > mark {
            best.push(Ranked { token, logit: tame(logit) });
            if best.len() == buffer(k) {
                best.select_nth_unstable_by(k - 1, Ranked::by_rank);
                best.truncate(k);
                mark = best[k - 1].logit;
            }
        }
    }
    best.sort_unstable_by(Ranked::by_rank);
    best.truncate(k);
}

/// How many to gather before picking the best k: enough that picking is rare.
pub(crate) fn buffer(k: usize) -> usize {
    k.saturating_add(k.max(256))
}
