//! Attention, written once for all register lengths.

use std::mem::MaybeUninit;

use half::f16;

use super::{Cell, MAX_PARTS, Vector, exp, fold, to_lanes};
use crate::math;
use crate::scalar::{self, AttentionStep, KEY_BLOCK, KvRef, LANES, RunningSoftmax};

/// The most query heads that process the keys together.
const HEAD_TILE: usize = 64;

/// Up to this many heads use a smaller buffer of scores, which is faster to clear.
const FEW_HEADS: usize = 8;

/// The longest keys for which a register of them can be widened.
const MAX_HEAD_DIM: usize = 1024;

/// Whether keys and values fill whole registers, as in nearly all models, and are short enough to be widened.
#[inline(always)]
pub(crate) fn fits<V: Vector>(step: &AttentionStep<'_>) -> bool {
    let whole = step.head_dim.is_multiple_of(V::LANES) && step.value_dim.is_multiple_of(V::LANES);
    whole && step.head_dim <= MAX_HEAD_DIM
}

/// As [`scalar::attend`], for steps that [fit](fits).
///
/// # Safety
/// The processor must have the register's instructions.
#[inline(always)]
pub(crate) unsafe fn attend<V: Vector>(
    step: &AttentionStep<'_>,
    running: &mut [RunningSoftmax],
    out: &mut [f32],
) {
    assert!(fits::<V>(step));
    assert_eq!(step.queries.len(), running.len() * step.head_dim);
    assert_eq!(out.len(), running.len() * step.value_dim);
    // SAFETY: the caller's promise.
    unsafe {
        match (step.keys, step.values) {
            (KvRef::F16(keys), KvRef::F16(values)) => {
                attend_typed::<V, f16>(step, keys, values, running, out)
            }
            (KvRef::F32(keys), KvRef::F32(values)) => {
                attend_typed::<V, f32>(step, keys, values, running, out)
            }
            _ => panic!("keys and values of different types"),
        }
    }
}

/// [`attend`] for keys and values of type `C`.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn attend_typed<V: Vector, C: Cell>(
    step: &AttentionStep<'_>,
    keys: &[C],
    values: &[C],
    running: &mut [RunningSoftmax],
    out: &mut [f32],
) {
    let count = step.count(keys.len(), values.len());
    let (keys, values) = (keys.as_ptr(), values.as_ptr());
    let (mut few, mut many);
    let scores: &mut [[f32; KEY_BLOCK]] = if running.len() <= FEW_HEADS {
        few = [[0.0; KEY_BLOCK]; FEW_HEADS];
        &mut few
    } else {
        many = [[0.0; KEY_BLOCK]; HEAD_TILE];
        &mut many
    };
    let tile = scores.len();
    let heads = step
        .queries
        .chunks(tile * step.head_dim)
        .zip(running.chunks_mut(tile))
        .zip(out.chunks_mut(tile * step.value_dim));
    for ((queries, running), out) in heads {
        let step = AttentionStep { queries, ..*step };
        // SAFETY: keys and values are `count` long, as `count` says.
        unsafe { attend_heads::<V, C>(&step, keys, values, count, running, scores, out) };
    }
}

/// Attention of up to [`HEAD_TILE`] heads to `count` keys.
///
/// # Safety
/// As [`attend`], and there must be `count` keys and values.
#[inline(always)]
unsafe fn attend_heads<V: Vector, C: Cell>(
    step: &AttentionStep<'_>,
    keys: *const C,
    values: *const C,
    count: usize,
    running: &mut [RunningSoftmax],
    scores: &mut [[f32; KEY_BLOCK]],
    out: &mut [f32],
) {
    for first in (0..count).step_by(V::LANES) {
        // SAFETY: the caller's promise.
        unsafe { score_keys::<V, C>(step, keys, first..count.min(first + V::LANES), scores) };
    }
    for ((running, scores), out) in
        running.iter_mut().zip(scores.iter_mut()).zip(out.chunks_exact_mut(step.value_dim))
    {
        // SAFETY: the caller's promise.
        let correction = unsafe { soften::<V>(running, scores, count) };
        out.iter_mut().for_each(|out| *out *= correction);
    }
    let mut head = 0;
    while head < running.len() {
        let (scores, out) = (&scores[head..], &mut out[head * step.value_dim..]);
        // SAFETY: the caller's promise; as many heads as asked for are left.
        unsafe {
            head += match (running.len() - head, V::LANES) {
                (8.., 4) => add_values::<V, C, 8, 2>(step, values, count, scores, out),
                (8.., _) => add_values::<V, C, 8, 1>(step, values, count, scores, out),
                (4.., 4) => add_values::<V, C, 4, 4>(step, values, count, scores, out),
                (4.., _) => add_values::<V, C, 4, 2>(step, values, count, scores, out),
                (2.., 4) => add_values::<V, C, 2, 8>(step, values, count, scores, out),
                (2.., _) => add_values::<V, C, 2, 4>(step, values, count, scores, out),
                (_, 16) => add_values::<V, C, 1, 4>(step, values, count, scores, out),
                (_, _) => add_values::<V, C, 1, 8>(step, values, count, scores, out),
            }
        }
    }
}

/// The scores of up to a register of keys for all heads.
///
/// # Safety
/// As [`attend`], and the keys must exist.
#[inline(always)]
unsafe fn score_keys<V: Vector, C: Cell>(
    step: &AttentionStep<'_>,
    keys: *const C,
    range: std::ops::Range<usize>,
    scores: &mut [[f32; KEY_BLOCK]],
) {
    let (dim, chunks) = (step.head_dim, step.head_dim / V::LANES);
    // All heads read the keys, so they are widened once: `[chunks][V::LANES keys][V::LANES channels]`.
    let mut wide = MaybeUninit::<[V; MAX_HEAD_DIM]>::uninit();
    let wide = wide.as_mut_ptr().cast::<V>();
    for chunk in 0..chunks {
        for i in 0..V::LANES {
            // If there are fewer keys, the last one is repeated and its score is ignored.
            let key = (range.start + i).min(range.end - 1);
            // SAFETY: the key exists; there are as many registers for each chunk.
            unsafe { wide.add(chunk * V::LANES + i).write(C::load(keys.add(key * dim + chunk * V::LANES))) };
        }
    }
    // The number of keys whose accumulators fit the registers.
    let together = V::LANES.min(V::SUMS / V::PARTS);
    // SAFETY: the caller's promise.
    let (zero, scale) = unsafe { (V::splat(0.0), V::splat(step.scale)) };
    for (query, scores) in step.queries.chunks_exact(dim).zip(scores) {
        let mut sums = [zero; LANES];
        for first in (0..V::LANES).step_by(together) {
            // Sixteen accumulators per key.
            let mut acc = [[zero; MAX_PARTS]; LANES];
            for chunk in (0..chunks).step_by(V::PARTS) {
                for part in 0..V::PARTS {
                    if chunk + part < chunks {
                        // SAFETY: the query is as long as a key, and the keys were written above.
                        let (q, k) = unsafe {
                            let q = V::load(query.as_ptr().add((chunk + part) * V::LANES));
                            (q, wide.add((chunk + part) * V::LANES + first))
                        };
                        for i in 0..together {
                            // SAFETY: as above.
                            acc[i][part] = q.mul_add(unsafe { k.add(i).read() }, acc[i][part]);
                        }
                    }
                }
            }
            for i in 0..together {
                sums[first + i] = fold(&acc[i]);
            }
        }
        // SAFETY: `range` starts at a multiple of the lanes, so a block of scores has room for all.
        unsafe {
            V::sum_across(&sums).mul(scale).store(scores[range.start..][..V::LANES].as_mut_ptr());
        }
    }
}

/// Converts a head's `count` scores to weights. Returns the factor that corrects earlier sums.
///
/// # Safety
/// As [`attend`].
#[inline(always)]
unsafe fn soften<V: Vector>(
    running: &mut RunningSoftmax,
    scores: &mut [f32; KEY_BLOCK],
    count: usize,
) -> f32 {
    let max = scores[..count].iter().fold(running.max, |max, &score| max.max(score));
    // Beyond the end, weights become zero, which does not change the sums.
    scores[count..count.next_multiple_of(V::LANES)].fill(f32::NEG_INFINITY);
    // SAFETY: the caller's promise.
    let (largest, mut acc) = unsafe { (V::splat(max), [V::splat(0.0); MAX_PARTS]) };
    for first in (0..count).step_by(LANES) {
        for part in 0..V::PARTS {
            let at = first + part * V::LANES;
            if at < count {
                // SAFETY: the block of scores is a multiple of all registers' lengths.
                unsafe {
                    let scores = scores.as_mut_ptr().add(at);
                    let weights = exp(V::load(scores).sub(largest));
                    weights.store(scores);
                    acc[part] = acc[part].add(weights);
                }
            }
        }
    }
    let correction = math::exp(running.max - max);
    let sum = running.sum.mul_add(correction, scalar::sum_lanes(&to_lanes(&acc)));
    *running = RunningSoftmax { max, sum };
    correction
}

/// Adds the weighted values to the outputs of `H` heads, `N` registers of channels at a time; returns `H`.
///
/// # Safety
/// As [`attend`], and there must be `count` values, and scores and outputs for `H` heads.
#[inline(always)]
unsafe fn add_values<V: Vector, C: Cell, const H: usize, const N: usize>(
    step: &AttentionStep<'_>,
    values: *const C,
    count: usize,
    scores: &[[f32; KEY_BLOCK]],
    out: &mut [f32],
) -> usize {
    let dim = step.value_dim;
    let scores = scores.first_chunk::<H>().expect("scores for all heads");
    let out = out[..H * dim].as_mut_ptr();
    let mut first = 0;
    while first + N * V::LANES <= dim {
        // SAFETY: that many channels are left, by the condition above.
        unsafe { add_channels::<V, C, H, N>(step, first, values, count, scores, out) };
        first += N * V::LANES;
    }
    while first < dim {
        // SAFETY: the channels fill whole registers.
        unsafe { add_channels::<V, C, H, 1>(step, first, values, count, scores, out) };
        first += V::LANES;
    }
    H
}

/// [`add_values`] for the channels from `first` on.
///
/// # Safety
/// As there, and `N` registers of channels must be left.
#[inline(always)]
unsafe fn add_channels<V: Vector, C: Cell, const H: usize, const N: usize>(
    step: &AttentionStep<'_>,
    first: usize,
    values: *const C,
    count: usize,
    scores: &[[f32; KEY_BLOCK]; H],
    out: *mut f32,
) {
    let dim = step.value_dim;
    // Asserted once, so that the compiler need not check it for every key.
    assert!(count <= KEY_BLOCK);
    // SAFETY: the caller's promise.
    let zero = unsafe { V::splat(0.0) };
    let mut acc = [[zero; N]; H];
    for h in 0..H {
        for n in 0..N {
            // SAFETY: the caller's promise.
            acc[h][n] = unsafe { V::load(out.add(h * dim + first + n * V::LANES)) };
        }
    }
    for key in 0..count {
        let mut weights = [zero; H];
        for h in 0..H {
            // SAFETY: the caller's promise.
            weights[h] = unsafe { V::splat(scores[h][key]) };
        }
        for n in 0..N {
            // SAFETY: the caller's promise.
            let v: V = unsafe { C::load(values.add(key * step.value_stride + first + n * V::LANES)) };
            for h in 0..H {
                acc[h][n] = weights[h].mul_add(v, acc[h][n]);
            }
        }
    }
    for h in 0..H {
        for n in 0..N {
            // SAFETY: the caller's promise.
            unsafe { acc[h][n].store(out.add(h * dim + first + n * V::LANES)) };
        }
    }
}
