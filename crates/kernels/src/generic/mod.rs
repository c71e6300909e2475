//! Float kernels that differ between instruction sets only in the length of registers, written once over [`Vector`].
//! Each set's module implements the trait for its register.
//!
//! The functions here are compiled without the instructions that they use. So they are all `#[inline(always)]`, and
//! only functions with the target features call them, into which they are inlined. A closure defined here might not be
//! inlined, so no closure works on registers.
//!
//! Arrays of registers are as long as the set with the most registers per value needs. The compiler removes those that
//! another set does not use.

// Loops over registers use indices, so that they are unrolled.
#![allow(clippy::needless_range_loop)]

pub(crate) mod attention;
pub(crate) mod products;

use half::{bf16, f16};

use crate::math;
use crate::scalar::LANES;

/// The most registers for [`LANES`] floats.
pub(crate) const MAX_PARTS: usize = 4;

/// A register of floats.
///
/// Only unsafe functions create one, and their callers guarantee that the CPU has the register's instructions. So
/// everything that takes one is safe.
pub(crate) trait Vector: Copy {
    /// Floats in a register.
    const LANES: usize;
    /// Registers that sums may use: half of all registers.
    const SUMS: usize;
    /// Registers for the sixteen accumulators of a float sum.
    const PARTS: usize = LANES / Self::LANES;

    /// The same value in all lanes.
    ///
    /// # Safety
    /// The processor must have the register's instructions.
    unsafe fn splat(value: f32) -> Self;

    /// Loads a register of floats, which need not be aligned.
    ///
    /// # Safety
    /// The floats must exist, and the processor must have the register's instructions.
    unsafe fn load(from: *const f32) -> Self;

    /// As [`load`](Self::load), from half floats.
    ///
    /// # Safety
    /// As there.
    unsafe fn load_f16(from: *const f16) -> Self;

    /// Like [`load`](Self::load), from bfloat16.
    ///
    /// # Safety
    /// As there.
    unsafe fn load_bf16(from: *const bf16) -> Self;

    /// Stores all lanes. The address need not be aligned.
    ///
    /// # Safety
    /// There must be space for them.
    unsafe fn store(self, to: *mut f32);

    /// `self + y`
    fn add(self, y: Self) -> Self;

    /// `self - y`
    fn sub(self, y: Self) -> Self;

    /// `self · y`
    fn mul(self, y: Self) -> Self;

    /// `self · y + z`, fused.
    fn mul_add(self, y: Self, z: Self) -> Self;

    /// The nearest integers, ties to even.
    fn round(self) -> Self;

    /// `self · 2^⌊n/2⌋ · 2^⌈n/2⌉` for integers `n` for which both powers are normal floats.
    fn scale_by_power(self, n: Self) -> Self;

    /// `yes` where `self < y`, else `no`.
    fn select_less(self, y: Self, yes: Self, no: Self) -> Self;

    /// The sums of the first [`LANES`](Self::LANES) vectors, one per lane. Lanes are added in the order of
    /// [`sum_lanes`](crate::scalar::sum_lanes).
    fn sum_across(v: &[Self; LANES]) -> Self;
}

/// Defines operations of a [`Vector`] that need only its register's instructions.
macro_rules! operations {
    ($($name:ident($this:ident $(, $arg:ident)*) => $body:expr;)*) => {$(
        #[inline(always)]
        fn $name($this $(, $arg: Self)*) -> Self {
            // SAFETY: a register exists only where the processor has its instructions.
            unsafe { $body }
        }
    )*};
}
pub(crate) use operations;

/// A stored float type.
pub(crate) trait Cell: Into<f32> {
    /// Loads a register of them, converted to f32. They need not be aligned.
    ///
    /// # Safety
    /// They must exist, and the processor must have the register's instructions.
    unsafe fn load<V: Vector>(from: *const Self) -> V;
}

impl Cell for f32 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const f32) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(from) }
    }
}

impl Cell for f16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const f16) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_f16(from) }
    }
}

impl Cell for bf16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const bf16) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_bf16(from) }
    }
}

/// As [`math::exp`], for all lanes.
#[inline(always)]
pub(crate) fn exp<V: Vector>(x: V) -> V {
    // SAFETY: a register exists only where the CPU has its instructions.
    unsafe {
        let n = x.mul(V::splat(std::f32::consts::LOG2_E)).round();
        let r = n.mul_add(V::splat(-math::LN2_HIGH), x);
        let r = n.mul_add(V::splat(-math::LN2_LOW), r);
        let mut p = V::splat(math::EXP_POLYNOMIAL[0]);
        for c in &math::EXP_POLYNOMIAL[1..] {
            p = p.mul_add(r, V::splat(*c));
        }
        let y = x.select_less(V::splat(math::EXP_LOWEST), V::splat(0.0), p.scale_by_power(n));
        V::splat(math::EXP_HIGHEST).select_less(x, V::splat(f32::INFINITY), y)
    }
}

/// Stores sixteen accumulators, for [`sum_lanes`](crate::scalar::sum_lanes).
#[inline(always)]
pub(crate) fn to_lanes<V: Vector>(parts: &[V]) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    store_lanes(parts, &mut lanes);
    lanes
}

/// Like [`to_lanes`], into an array.
#[inline(always)]
fn store_lanes<V: Vector>(parts: &[V], lanes: &mut [f32; LANES]) {
    for part in 0..V::PARTS {
        // SAFETY: sixteen floats are so many registers.
        unsafe { parts[part].store(lanes.as_mut_ptr().add(part * V::LANES)) };
    }
}

/// The inverse of [`to_lanes`].
///
/// # Safety
/// The processor must have the register's instructions.
#[inline(always)]
unsafe fn from_lanes<V: Vector>(lanes: &[f32; LANES]) -> [V; MAX_PARTS] {
    // SAFETY: the caller's promise.
    let mut parts = [unsafe { V::splat(0.0) }; MAX_PARTS];
    for part in 0..V::PARTS {
        // SAFETY: sixteen floats are so many registers.
        parts[part] = unsafe { V::load(lanes.as_ptr().add(part * V::LANES)) };
    }
    parts
}

/// The first additions of [`sum_lanes`](crate::scalar::sum_lanes), which reduce sixteen accumulators to one register.
#[inline(always)]
fn fold<V: Vector>(parts: &[V; MAX_PARTS]) -> V {
    match V::PARTS {
        1 => parts[0],
        2 => parts[0].add(parts[1]),
        _ => parts[0].add(parts[2]).add(parts[1].add(parts[3])),
    }
}
