//! A convolution per channel, and linear attention by the gated delta rule: gates, and one step of the recurrence.

use super::dot;
use crate::math::{exp, sigmoid, silu, softplus};

/// Columns of a recurrent state that are stored together and computed in one step. The state of a 128×128 head does not
/// fit the first-level cache, but this many of its columns do.
pub const STATE_COLUMNS: usize = 32;

/// A position's contribution to a convolution.
#[derive(Clone, Copy, Debug)]
pub struct Tap<'a> {
    /// `[channels]` The weights at this distance.
    pub w: &'a [f32],
    /// `[channels]` The input at that position.
    pub x: &'a [f32],
}

/// One position of a separate convolution per channel, from the farthest tap to the nearest: `out = Σ w · x`.
#[inline(always)]
pub fn convolve(taps: &[Tap<'_>], out: &mut [f32]) {
    out.fill(0.0);
    for tap in taps {
        assert!(tap.w.len() == out.len() && tap.x.len() == out.len());
        for ((out, w), x) in out.iter_mut().zip(tap.w).zip(tap.x) {
            *out = w.mul_add(*x, *out);
        }
    }
}

/// `x = SiLU(x)`
#[inline(always)]
pub fn activate_silu(x: &mut [f32]) {
    for x in x {
        *x = silu(*x);
    }
}

/// Scales a vector to the length `scale`: `x · scale / sqrt(Σ x² + eps)`.
#[inline(always)]
pub fn l2_norm(x: &mut [f32], eps: f32, scale: f32) {
    let scale = scale / (dot(x, x) + eps).sqrt();
    for x in x {
        *x *= scale;
    }
}

/// Computes the gates of every head from their projections: the share of its state that stays, `a ← exp(rate ·
/// softplus(a + bias))`, and the strength of the correction, `b ← σ(b)`.
#[inline(always)]
pub fn delta_gates(a: &mut [f32], b: &mut [f32], rates: &[f32], biases: &[f32]) {
    assert!(a.len() == rates.len() && a.len() == biases.len() && a.len() == b.len());
    for (((a, b), rate), bias) in a.iter_mut().zip(b).zip(rates).zip(biases) {
        *a = exp(rate * softplus(*a + bias));
        *b = sigmoid(*b);
    }
}

/// One token's input to the state of a head.
#[derive(Clone, Copy, Debug)]
pub struct DeltaStep<'a> {
    /// `[key_dim]` The query to the new state.
    pub q: &'a [f32],
    /// `[key_dim]` The key under which the value is stored.
    pub k: &'a [f32],
    /// `[STATE_COLUMNS]` These columns of the value.
    pub v: &'a [f32; STATE_COLUMNS],
    /// The share of the state that stays.
    pub keep: f32,
    /// The strength with which the difference between the value and the state's answer to the key is corrected.
    pub correct: f32,
}

/// One step of the gated delta rule on some columns of a state S `[key_dim, STATE_COLUMNS]`. The old state is in
/// `before`, or in place: `S ← keep · S`, `δ = correct · (v − Sᵀ k)`, `S ← S + k δᵀ`, `out = Sᵀ q`.
///
/// Even and odd rows are summed separately, in order, and then added.
#[inline(always)]
pub fn delta_step(
    step: &DeltaStep<'_>,
    before: Option<&[f32]>,
    state: &mut [f32],
    out: &mut [f32; STATE_COLUMNS],
) {
    let (state, rest) = state.as_chunks_mut::<STATE_COLUMNS>();
    assert!(rest.is_empty() && step.q.len() == state.len() && step.k.len() == state.len());
    let before = before.map(|before| before.as_chunks::<STATE_COLUMNS>().0);
    assert!(before.is_none_or(|before| before.len() == state.len()));

    // Two bodies, so that the source is not checked for every row.
    match before {
        Some(before) => {
            let delta = correction(step, before);
            correct(step, &delta, state, out, |i, _| before[i]);
        }
        None => {
            let delta = correction(step, state);
            correct(step, &delta, state, out, |_, row| *row);
        }
    }
}

/// `δ = correct · (v − (keep · S)ᵀ k)`
#[inline(always)]
fn correction(step: &DeltaStep<'_>, state: &[[f32; STATE_COLUMNS]]) -> [f32; STATE_COLUMNS] {
    let mut even = [0.0; STATE_COLUMNS];
    let mut odd = [0.0; STATE_COLUMNS];
    let (pairs, last) = state.as_chunks::<2>();
    let (keys, last_key) = step.k.as_chunks::<2>();
    for ([first, second], k) in pairs.iter().zip(keys) {
        multiply_add(&mut even, k[0], first);
        multiply_add(&mut odd, k[1], second);
    }
    for (row, k) in last.iter().zip(last_key) {
        multiply_add(&mut even, *k, row);
    }
    let mut delta = [0.0; STATE_COLUMNS];
    for (j, delta) in delta.iter_mut().enumerate() {
        let found = step.keep * (even[j] + odd[j]);
        *delta = step.correct * (step.v[j] - found);
    }
    delta
}

/// `S ← keep · S + k δᵀ`, `out = Sᵀ q`. `old` returns a row of the old state, given its index and the row in place.
#[inline(always)]
fn correct(
    step: &DeltaStep<'_>,
    delta: &[f32; STATE_COLUMNS],
    state: &mut [[f32; STATE_COLUMNS]],
    out: &mut [f32; STATE_COLUMNS],
    old: impl Fn(usize, &[f32; STATE_COLUMNS]) -> [f32; STATE_COLUMNS],
) {
    let mut even = [0.0; STATE_COLUMNS];
    let mut odd = [0.0; STATE_COLUMNS];
    let update =
        |i: usize, k: f32, q: f32, row: &mut [f32; STATE_COLUMNS], sum: &mut [f32; STATE_COLUMNS]| {
            let old = old(i, row);
            for j in 0..STATE_COLUMNS {
                row[j] = k.mul_add(delta[j], step.keep * old[j]);
                sum[j] = q.mul_add(row[j], sum[j]);
            }
        };
    let (pairs, last) = state.as_chunks_mut::<2>();
    let (keys, last_key) = step.k.as_chunks::<2>();
    let (queries, last_query) = step.q.as_chunks::<2>();
    let rows = 2 * pairs.len();
    for (i, (([first, second], k), q)) in pairs.iter_mut().zip(keys).zip(queries).enumerate() {
        update(2 * i, k[0], q[0], first, &mut even);
        update(2 * i + 1, k[1], q[1], second, &mut odd);
    }
    for ((row, k), q) in last.iter_mut().zip(last_key).zip(last_query) {
        update(rows, *k, *q, row, &mut even);
    }
    for (out, (even, odd)) in out.iter_mut().zip(even.iter().zip(&odd)) {
        *out = even + odd;
    }
}

#[inline(always)]
fn multiply_add(sum: &mut [f32; STATE_COLUMNS], weight: f32, row: &[f32; STATE_COLUMNS]) {
    for (sum, x) in sum.iter_mut().zip(row) {
        *sum = weight.mul_add(*x, *sum);
    }
}
