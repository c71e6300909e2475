//! The functions between the products of a feed-forward block, and gates.

use crate::math::{sigmoid, silu, softplus, tanh};

/// How a feed-forward block combines its gate and up products, or what it does with up if it has no gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `SiLU(gate) · up`
    SwiGlu,
    /// `(up + 1) · gate · σ(alpha · gate)`, with `gate` at most `limit` and `up` within `±limit`
    Clamped {
        /// The steepness of the sigmoid.
        alpha: f32,
        /// The bound of both.
        limit: f32,
    },
    /// `SiLU(gate) · up`, with `gate` at most the limit and `up` within `±limit`
    ClippedBefore(f32),
    /// `SiLU(gate) · up`, with `SiLU(gate)` at most the limit and `up` within `±limit`
    ClippedAfter(f32),
    /// `GELU(gate) · up`, with the approximation of GELU by a hyperbolic tangent
    GeGlu,
    /// `max(gate, 0) · up`
    ReGlu,
    /// `max(up, 0)²`, without a gate
    ReluSquared,
}

impl Activation {
    /// Whether it belongs to a block with a gate.
    pub fn is_gated(self) -> bool {
        !matches!(self, Activation::ReluSquared)
    }
}

/// `x ← activation(x, up)`, where `x` is the gate; without a gate, `x` is up and `up` is empty.
#[inline(always)]
pub fn activate(x: &mut [f32], up: &[f32], activation: Activation) {
    assert_eq!(if activation.is_gated() { x.len() } else { 0 }, up.len());
    let each = x.iter_mut().zip(up);
    match activation {
        Activation::SwiGlu => each.for_each(|(g, u)| *g = silu(*g) * u),
        Activation::Clamped { alpha, limit } => each.for_each(|(g, u)| {
            let cut = at_most(*g, limit);
            *g = (u.clamp(-limit, limit) + 1.0) * (cut * sigmoid(alpha * cut));
        }),
        Activation::ClippedBefore(limit) => {
            each.for_each(|(g, u)| *g = silu(at_most(*g, limit)) * u.clamp(-limit, limit));
        }
        Activation::ClippedAfter(limit) => {
            each.for_each(|(g, u)| *g = at_most(silu(*g), limit) * u.clamp(-limit, limit));
        }
        Activation::GeGlu => each.for_each(|(g, u)| *g = gelu(*g) * u),
        Activation::ReGlu => each.for_each(|(g, u)| *g = if *g < 0.0 { 0.0 } else { *g } * u),
        Activation::ReluSquared => {
            x.iter_mut().for_each(|x| *x = if *x < 0.0 { 0.0 } else { *x * *x });
        }
    }
}

/// `x`, or the limit if `x` is larger. Unlike `f32::min`, it keeps a NaN.
#[inline(always)]
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// `x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`
#[inline(always)]
fn gelu(x: f32) -> f32 {
    // (1 + tanh(y)) / 2 is σ(2y).
    const TWICE_ROOT: f32 = 1.595_769_2;
    x * sigmoid(TWICE_ROOT * (0.044_715 * x * x).mul_add(x, x))
}

/// How a gate's logits become factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `σ(logit)`
    Sigmoid,
    /// `ln(1 + e^logit)`
    Softplus,
    /// The number itself.
    Factor,
}

/// `x ← x · gate(logits)`, where every logit belongs to as many consecutive numbers of `x`.
#[inline(always)]
pub fn gate(x: &mut [f32], logits: &[f32], gate: Gate) {
    assert!(x.len().is_multiple_of(logits.len()));
    match gate {
        Gate::Sigmoid => multiply_parts(x, logits, sigmoid),
        Gate::Softplus => multiply_parts(x, logits, softplus),
        Gate::Factor => multiply_parts(x, logits, |factor| factor),
    }
}

#[inline(always)]
fn multiply_parts(x: &mut [f32], logits: &[f32], factor: impl Fn(f32) -> f32) {
    if x.len() == logits.len() {
        return x.iter_mut().zip(logits).for_each(|(x, &logit)| *x *= factor(logit));
    }
    for (part, &logit) in x.chunks_exact_mut(x.len() / logits.len()).zip(logits) {
        let factor = factor(logit);
        part.iter_mut().for_each(|x| *x *= factor);
    }
}

/// `x ← cap · tanh(x / cap)`
#[inline(always)]
pub fn softcap(x: &mut [f32], cap: f32) {
    for x in x {
        *x = cap * tanh(*x / cap);
    }
}
