//! Ranks logits.

use std::cmp::Ordering;

/// A token and its logit, made comparable by [`tame`](tame).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ranked {
    /// The token.
    pub token: u32,
    /// Its logit.
    pub logit: f32,
}

impl Ranked {
    /// Compares: the higher logit first; equal logits by token number.
    pub fn by_rank(a: &Ranked, b: &Ranked) -> Ordering {
        b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
    }
}

/// Makes a logit comparable: NaN becomes minus infinity, plus infinity the largest finite number, and minus zero
/// zero, so that the two are equal.
pub fn tame(logit: f32) -> f32 {
    let logit = if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) };
    // Turns minus zero into zero.
    logit + 0.0
}

/// The `k` likeliest tokens, the likeliest first; fewer if fewer are possible (have a logit above minus infinity).
pub fn rank(logits: &[f32], k: usize, best: &mut Vec<Ranked>) {
    best.clear();
    if k == 0 {
        return;
    }
    // When the buffer is full it shrinks to the best k, and the last of these becomes the mark to beat: a later token
    // with an equal logit ranks below it. Few logits pass the comparison, and no NaN does.
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

/// How many candidates to collect before keeping the best k: enough that this happens rarely.
pub(crate) fn buffer(k: usize) -> usize {
    k.saturating_add(k.max(256))
}
