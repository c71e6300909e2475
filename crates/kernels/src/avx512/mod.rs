//! The kernels for CPUs with AVX-512 and its integer dot products (VNNI).
//!
//! Products with several tokens unpack sixteen rows so that lanes are rows ([`Panel`]), and multiply them with a few
//! tokens at a time. Within a block all arithmetic is integer and exact, and float operations run in block order, so
//! the bits are those of [`scalar`]. Products with one token are limited by memory, which the [`avx2`] kernels use
//! fully; wider registers would only add work between the loads.
//!
//! Attention and products with floats are those of [`generic`](crate::generic), over a register of sixteen.
//!
//! Kernels that are not worth writing by hand are the scalar ones, compiled for these instructions: their operations
//! and order are fixed, so the compiler can only make them faster.
//!
//! Closures with instructions of this set are called only from here: a library function such as `array::from_fn` is
//! compiled without the instructions and would not inline the closure.

// Loops over registers use indices, so that they are unrolled.
#![allow(clippy::needless_range_loop)]

mod planes;
mod shared;

use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::DType;
use crate::avx2;
use crate::compiled::compiled_scalar_kernels;
use crate::encoding::Encoding;
use crate::generic::{Vector, attention, operations, products};
use crate::quant::planes::dequantise;
use crate::quant::{Q4K, Q5K, Q6K, Quant};
use crate::scalar::{self, AttentionStep, LANES, RunningSoftmax};
use crate::tensor::{MatRef, Q8Panel, Rows, TileMut};

/// Rows that are computed together: the number of 32-bit lanes of a register.
const ROWS: usize = 16;

/// Tokens whose activations stay in the second-level cache while all rows of a matrix are processed.
const TOKEN_CHUNK: usize = 128;

/// Whether this CPU has all instructions of this module.
pub fn available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

/// As [`scalar::matmul_f32`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub fn matmul_f32(w: MatRef<'_>, x: Rows<'_, f32>, out: &mut TileMut<'_, f32>) {
    let is_float = match w.encoding {
        Encoding::Blocks(dtype) => dtype.is_float(),
        encoding => matches!(encoding, Encoding::Tiles(_)),
    };
    if x.len() == 1 && is_float {
        return avx2::matmul_f32(w, x, out);
    }
    // SAFETY: a CPU that runs this function has its instructions.
    unsafe { products::matmul_widened::<__m512>(w, x, out, |row, col, out| widen(&w, row, col, out)) }
}

/// As [`scalar::matmul_q8`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub fn matmul_q8(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    assert_eq!((out.rows(), out.cols()), (x.len(), w.rows));
    assert_eq!(x.width(), Q8Panel::count(w.cols));
    if x.len() == 1 {
        return avx2::matmul_q8(w, x, out);
    }
    let Encoding::Blocks(dtype) = w.encoding else { return planes::many_tokens(w, x, out) };
    match (dtype, x.len()) {
        (DType::Q8_0, _) => many_tokens_q8_0(w, x, out),
        (DType::Q4_K, _) => many_tokens::<Q4K>(w, x, out),
        (DType::Q5_K, _) => many_tokens::<Q5K>(w, x, out),
        (DType::Q6_K, _) => many_tokens::<Q6K>(w, x, out),
        (dtype, _) => avx2::lanes::with_lanes!(dtype, Q => shared::many_tokens::<Q>(w, x, out)),
    }
}

/// As [`scalar::matmul_transposed`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub fn matmul_transposed(w: MatRef<'_>, x: Rows<'_, f32>, out: &mut TileMut<'_, f32>) {
    scalar::matmul_transposed_by(w, x, out, |w, row, col, out| widen(&w, row, col, out));
}

/// As [`scalar::attend`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub fn attend(step: &AttentionStep<'_>, running: &mut [RunningSoftmax], out: &mut [f32]) {
    if !attention::fits::<__m512>(step) {
        return avx2::attend(step, running, out);
    }
    // SAFETY: a CPU that runs this function has its instructions.
    unsafe { attention::attend::<__m512>(step, running, out) }
}

compiled_scalar_kernels!("avx512f,avx512bw,avx512vl,avx512vnni");

// ---------------------------------------------------------------------------------------------------
// Sixteen rows of a matrix

/// The starts of sixteen rows of a matrix. Missing rows are replaced by the last one, whose results are dropped.
struct Rows16([*const u8; ROWS]);

impl Rows16 {
    fn new(w: MatRef<'_>, first: usize) -> Rows16 {
        let mut rows = [w.row(first).as_ptr(); ROWS];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = w.row((first + i).min(w.rows - 1)).as_ptr();
        }
        Rows16(rows)
    }
}

/// Prefetches the bytes that are needed next, a few at a time and in order, because memory is slow with bursts and
/// strides.
struct Ahead {
    next: *const u8,
    lines: usize,
    /// Cache lines per step.
    share: usize,
}

impl Ahead {
    /// Prefetches `bytes` bytes from `first` on, spread over `steps` steps.
    fn new(first: *const u8, bytes: usize, steps: usize) -> Ahead {
        let lines = bytes.div_ceil(64);
        Ahead { next: first, lines, share: lines.div_ceil(steps) }
    }

    /// Prefetches one share.
    #[inline(always)]
    fn step(&mut self) {
        let share = self.share.min(self.lines);
        for _ in 0..share {
            // SAFETY: a prefetch of any address is harmless.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.next.cast()) };
            self.next = self.next.wrapping_add(64);
        }
        self.lines -= share;
    }
}

/// Four consecutive dwords of sixteen rows: vector `i` holds dword `i` of every row.
///
/// # Safety
/// Every row must have 16 bytes at `offset`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn four_dwords(rows: &Rows16, offset: usize) -> [__m512i; 4] {
    // SAFETY: the caller's promise.
    let load = |row: usize| unsafe { _mm_loadu_si128(rows.0[row].add(offset).cast()) };
    // Vector i holds rows i, i + 4, i + 8, i + 12 in its four quarters.
    let quarter = |i: usize| {
        let v = _mm512_castsi128_si512(load(i));
        let v = _mm512_inserti32x4::<1>(v, load(i + 4));
        let v = _mm512_inserti32x4::<2>(v, load(i + 8));
        _mm512_inserti32x4::<3>(v, load(i + 12))
    };
    let (r0, r1, r2, r3) = (quarter(0), quarter(1), quarter(2), quarter(3));
    let (a, b) = (_mm512_unpacklo_epi32(r0, r1), _mm512_unpacklo_epi32(r2, r3));
    let (c, d) = (_mm512_unpackhi_epi32(r0, r1), _mm512_unpackhi_epi32(r2, r3));
    [
        _mm512_unpacklo_epi64(a, b),
        _mm512_unpackhi_epi64(a, b),
        _mm512_unpacklo_epi64(c, d),
        _mm512_unpackhi_epi64(c, d),
    ]
}

/// The sums of sixteen vectors, one per lane. Lanes are added in the order of [`scalar::sum_lanes`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn sum_across(v: &[__m512; 16]) -> __m512 {
    let eight = |a: usize, b: usize| {
        let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(v[a], v[b]);
        _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_10_11_10>(v[a], v[b]))
    };
    let four = |a, b| {
        let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
        _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
    };
    let two = |a, b| {
        let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
        let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
        _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
    };
    let one = |a, b| {
        let even = _mm512_shuffle_ps::<0b10_00_10_00>(a, b);
        _mm512_add_ps(even, _mm512_shuffle_ps::<0b11_01_11_01>(a, b))
    };
    // The order of the inputs determines the order of the outputs.
    let half = |i: usize| {
        let low = four(eight(i, i + 4), eight(i + 8, i + 12));
        two(low, four(eight(i + 1, i + 5), eight(i + 9, i + 13)))
    };
    one(half(0), half(2))
}

// ---------------------------------------------------------------------------------------------------
// Products with f32 activations

/// A piece of a row, from column `col` on, as floats.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn widen(w: &MatRef<'_>, row: usize, col: usize, out: &mut [f32]) {
    let (first, end) = (2 * col, 2 * (col + out.len()));
    let halves = || &w.row(row)[first..end];
    match w.encoding {
        // SAFETY: a CPU that runs this function has its instructions.
        Encoding::Blocks(DType::F16) => unsafe { products::widen_cells::<__m512, f16>(halves(), out) },
        // SAFETY: as above.
        Encoding::Blocks(DType::BF16) => unsafe { products::widen_cells::<__m512, bf16>(halves(), out) },
        Encoding::Tiles(tiles) => avx2::widened::widen_tiles(w, tiles, row, col, out),
        _ => dequantise(*w, row, col, out),
    }
}

// ---------------------------------------------------------------------------------------------------
// Several tokens, K types

/// The scales of sixteen rows' blocks, row by lane.
struct Heads {
    d: __m512,
    dmin: __m512,
    /// Sub-scales 0–3 and 4–7 of each row, a byte each. Only Q4_K and Q5_K.
    scales: [__m512i; 2],
    /// Minima 0–3 and 4–7 of each row, a byte each. Only Q4_K and Q5_K.
    mins: [__m512i; 2],
}

/// # Safety
/// The rows must hold a block of `Q` at byte `at`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn heads<Q: Quant>(rows: &Rows16, at: usize) -> Heads {
    let zero = _mm512_setzero_si512();
    if Q::DTYPE == DType::Q6_K {
        // The last two of 210 bytes are the scale.
        // SAFETY: the caller's promise.
        let tail = unsafe { four_dwords(rows, at + 194) }[3];
        let d = half_to_float(_mm512_srli_epi32::<16>(tail));
        return Heads { d, dmin: _mm512_setzero_ps(), scales: [zero; 2], mins: [zero; 2] };
    }
    // SAFETY: the caller's promise.
    let [floats, low_scales, low_mins, high] = unsafe { four_dwords(rows, at) };
    let (six, four, two) = (_mm512_set1_epi8(0x3f), _mm512_set1_epi8(0x0f), _mm512_set1_epi8(0x30));
    let join = |nibble, bits| {
        // The upper two bits of a byte, moved down to bits 4 and 5.
        let top = _mm512_and_si512(_mm512_srli_epi16::<2>(bits), two);
        _mm512_or_si512(_mm512_and_si512(nibble, four), top)
    };
    Heads {
        d: half_to_float(floats),
        dmin: half_to_float(_mm512_srli_epi32::<16>(floats)),
        scales: [_mm512_and_si512(low_scales, six), join(high, low_scales)],
        mins: [_mm512_and_si512(low_mins, six), join(_mm512_srli_epi16::<4>(high), low_mins)],
    }
}

/// The f16 in the low half of every dword.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn half_to_float(v: __m512i) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v))
}

/// Sixteen rows of one block, unpacked so that lanes are rows.
#[repr(C, align(64))]
struct Panel {
    /// Four consecutive weights of every row, as unsigned bytes.
    lanes: [[u8; 64]; 64],
    /// The sub-scales of every row: one vector for 32 weights, or for 16 if the type has that many.
    scales: [[i32; ROWS]; 16],
    /// The minima of every row, if the type has any: a pair for each two sums of 32 activations.
    mins: [[i16; 2 * ROWS]; 4],
    /// The scale of every row.
    d: [f32; ROWS],
    /// The scale of every row's minima.
    dmin: [f32; ROWS],
}

impl Panel {
    fn new() -> Panel {
        Panel {
            lanes: [[0; 64]; 64],
            scales: [[0; ROWS]; 16],
            mins: [[0; 2 * ROWS]; 4],
            d: [0.0; ROWS],
            dmin: [0.0; ROWS],
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn many_tokens<Q: Quant>(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    let mut panels = [Panel::new(), Panel::new()];
    for chunk in (0..x.len()).step_by(TOKEN_CHUNK) {
        let tokens = chunk..x.len().min(chunk + TOKEN_CHUNK);
        let mut first = 0;
        while first < w.rows {
            // Two panels share the broadcast activations, which are most of the loads.
            first += if w.rows - first > ROWS {
                many_tokens_of_rows::<Q, 2>(w, first, x, tokens.clone(), out, &mut panels)
            } else {
                let [panel, _] = &mut panels;
                many_tokens_of_rows::<Q, 1>(w, first, x, tokens.clone(), out, std::array::from_mut(panel))
            };
        }
    }
}

/// The products of `R` times sixteen rows, starting with `first`, with some tokens. Returns the number of rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn many_tokens_of_rows<Q: Quant, const R: usize>(
    w: MatRef<'_>,
    first: usize,
    x: Rows<'_, Q8Panel>,
    tokens: std::ops::Range<usize>,
    out: &mut TileMut<'_, f32>,
    panels: &mut [Panel; R],
) -> usize {
    let bytes = Q::DTYPE.block_bytes();
    let next_rows = w.row(first).as_ptr().wrapping_add(R * ROWS * w.row(0).len());
    let rows: [Rows16; R] = std::array::from_fn(|r| Rows16::new(w, first + r * ROWS));
    for block in 0..x.width() {
        let share = R * ROWS * bytes;
        let steps = tokens.len().div_ceil(4);
        let mut ahead = Ahead::new(next_rows.wrapping_add(block * share), share, steps);
        for (r, panel) in panels.iter_mut().enumerate() {
            // SAFETY: a row has as many blocks as the activations have panels.
            unsafe { unpack::<Q>(&rows[r], block * bytes, panel) };
        }
        let mut token = tokens.start;
        while token < tokens.end {
            ahead.step();
            let at = At { first, block, token };
            token += match tokens.end - token {
                8.. if R == 1 => multiply::<Q, R, 8>(panels, x, out, at),
                4.. => multiply::<Q, R, 4>(panels, x, out, at),
                2.. => multiply::<Q, R, 2>(panels, x, out, at),
                _ => multiply::<Q, R, 1>(panels, x, out, at),
            };
        }
    }
    R * ROWS
}

/// The position within the product.
#[derive(Clone, Copy)]
struct At {
    first: usize,
    block: usize,
    token: usize,
}

/// Panel `panel` of `T` tokens from `first` on.
#[inline(always)]
fn pick<const T: usize>(x: Rows<'_, Q8Panel>, first: usize, panel: usize) -> [&Q8Panel; T] {
    let mut picked = [&x.row(first)[panel]; T];
    for t in 1..T {
        picked[t] = &x.row(first + t)[panel];
    }
    picked
}

/// The contribution of a token's sums of activations to its products with a block.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Sums {
    /// For types with minima: the sums of 32 activations as words, two in each of the first four. For Q6_K, whose lanes
    /// have an offset of 32: what must be subtracted from the products with 16 activations.
    offsets: [i32; 16],
}

impl Sums {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    fn new<Q: Quant>(x: &Q8Panel) -> Sums {
        let mut sums = Sums::default();
        // SAFETY: a panel has 16 sums, and the registers are as long as what is stored to.
        unsafe {
            let each = _mm256_load_si256(x.sums.as_ptr().cast());
            if Q::HAS_MINS {
                // The sum of 32 lanes fits sixteen bits.
                let pairs = _mm256_hadd_epi16(each, each);
                let pairs = _mm256_permute4x64_epi64::<0b10_00>(pairs);
                _mm_store_si128(sums.offsets.as_mut_ptr().cast(), _mm256_castsi256_si128(pairs));
            } else {
                let offsets = _mm512_slli_epi32::<5>(_mm512_cvtepi16_epi32(each));
                let offsets = _mm512_sub_epi32(_mm512_setzero_si512(), offsets);
                _mm512_store_si512(sums.offsets.as_mut_ptr().cast(), offsets);
            }
        }
        sums
    }
}

/// Adds one block's products with `T` tokens to the output; returns `T`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn multiply<Q: Quant, const R: usize, const T: usize>(
    panels: &[Panel; R],
    x: Rows<'_, Q8Panel>,
    out: &mut TileMut<'_, f32>,
    at: At,
) -> usize {
    // Groups of four weights that share a sub-scale.
    let groups = if Q::DTYPE == DType::Q6_K { 4 } else { 8 };
    let x: [&Q8Panel; T] = pick(x, at.token, at.block);
    let mut sums = [Sums::default(); T];
    for t in 0..T {
        sums[t] = Sums::new::<Q>(x[t]);
    }
    let zero = _mm512_setzero_si512();
    let mut products = [[zero; T]; R];
    for sub in 0..64 / groups {
        let mut dots = [[zero; T]; R];
        if !Q::HAS_MINS {
            for t in 0..T {
                dots.iter_mut().for_each(|dots| dots[t] = _mm512_set1_epi32(sums[t].offsets[sub]));
            }
        }
        for group in sub * groups..(sub + 1) * groups {
            let mut weights = [zero; R];
            for r in 0..R {
                // SAFETY: it is one register long.
                weights[r] = unsafe { _mm512_load_si512(panels[r].lanes[group].as_ptr().cast()) };
            }
            for t in 0..T {
                // SAFETY: a panel of activations has 64 groups of four.
                let four = unsafe { x[t].lanes.as_ptr().add(4 * group).cast::<i32>().read() };
                let four = _mm512_set1_epi32(four);
                for r in 0..R {
                    dots[r][t] = _mm512_dpbusd_epi32(dots[r][t], weights[r], four);
                }
            }
        }
        for r in 0..R {
            // SAFETY: it is one register long.
            let scales = unsafe { _mm512_load_si512(panels[r].scales[sub].as_ptr().cast()) };
            for t in 0..T {
                products[r][t] = _mm512_add_epi32(products[r][t], _mm512_mullo_epi32(dots[r][t], scales));
            }
        }
    }
    let mut mins = [[zero; T]; R];
    if Q::HAS_MINS {
        for pair in 0..4 {
            for t in 0..T {
                let sums = _mm512_set1_epi32(sums[t].offsets[pair]);
                for r in 0..R {
                    // SAFETY: it is one register long.
                    let factors = unsafe { _mm512_load_si512(panels[r].mins[pair].as_ptr().cast()) };
                    mins[r][t] = _mm512_dpwssd_epi32(mins[r][t], factors, sums);
                }
            }
        }
    }
    for t in 0..T {
        let scale = _mm512_set1_ps(x[t].scales[0]);
        for r in 0..R {
            let out = &mut out.row(at.token + t)[at.first + r * ROWS..];
            // SAFETY: the mask covers the length of `out`.
            unsafe {
                let mask = tail_mask(out.len());
                let before = _mm512_maskz_loadu_ps(if at.block == 0 { 0 } else { mask }, out.as_ptr());
                let d = _mm512_mul_ps(_mm512_load_ps(panels[r].d.as_ptr()), scale);
                let after = if Q::HAS_MINS {
                    let acc = _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(products[r][t]), before);
                    let dmin = _mm512_mul_ps(_mm512_load_ps(panels[r].dmin.as_ptr()), scale);
                    _mm512_fnmadd_ps(dmin, _mm512_cvtepi32_ps(mins[r][t]), acc)
                } else {
                    _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(products[r][t]), before)
                };
                _mm512_mask_storeu_ps(out.as_mut_ptr(), mask, after);
            }
        }
    }
    T
}

/// Unpacks sixteen rows of the block at byte `at`.
///
/// # Safety
/// The rows must hold a block of `Q` there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn unpack<Q: Quant>(rows: &Rows16, at: usize, panel: &mut Panel) {
    // SAFETY: the offsets stay inside a block, and the stores inside the panel.
    unsafe {
        let heads = heads::<Q>(rows, at);
        let nibble = _mm512_set1_epi8(0x0f);
        let low = |v| _mm512_and_si512(v, nibble);
        let high = |v| _mm512_and_si512(_mm512_srli_epi16::<4>(v), nibble);
        let mut store = |group: usize, v| _mm512_store_si512(panel.lanes[group].as_mut_ptr().cast(), v);
        match Q::DTYPE {
            DType::Q6_K => {
                let pair = _mm512_set1_epi8(0x30);
                let add = |nibble, from| _mm512_ternarylogic_epi32::<0xf8>(nibble, from, pair);
                for half in 0..2 {
                    for quad in 0..2 {
                        let top = four_dwords(rows, at + 128 + half * 32 + quad * 16);
                        let first = four_dwords(rows, at + half * 64 + quad * 16);
                        let second = four_dwords(rows, at + half * 64 + 32 + quad * 16);
                        for i in 0..4 {
                            let group = half * 32 + quad * 4 + i;
                            store(group, add(low(first[i]), _mm512_slli_epi16::<4>(top[i])));
                            store(group + 8, add(low(second[i]), _mm512_slli_epi16::<2>(top[i])));
                            store(group + 16, add(high(first[i]), top[i]));
                            store(group + 24, add(high(second[i]), _mm512_srli_epi16::<2>(top[i])));
                        }
                    }
                }
                for (four, scales) in four_dwords(rows, at + 192).into_iter().enumerate() {
                    let byte = |shift| {
                        _mm512_srai_epi32::<24>(_mm512_sllv_epi32(scales, _mm512_set1_epi32(24 - shift)))
                    };
                    let bytes = [byte(0), byte(8), byte(16), byte(24)];
                    for (i, &scale) in bytes.iter().enumerate() {
                        _mm512_store_si512(panel.scales[four * 4 + i].as_mut_ptr().cast(), scale);
                    }
                }
            }
            _ => {
                let (nibbles, five) = if Q::DTYPE == DType::Q5_K { (48, true) } else { (16, false) };
                let bit = _mm512_set1_epi8(0x10);
                for quad in 0..2 {
                    // The fifth bits of all eight parts of the block.
                    let fifth = if five { four_dwords(rows, at + 16 + quad * 16) } else { [bit; 4] };
                    for part in 0..4 {
                        let dwords = four_dwords(rows, at + nibbles + part * 32 + quad * 16);
                        for i in 0..4 {
                            let group = part * 16 + quad * 4 + i;
                            let (mut a, mut b) = (low(dwords[i]), high(dwords[i]));
                            if five {
                                let place = |bit_number: i32| {
                                    let left = _mm512_set1_epi16((4 - bit_number).max(0) as i16);
                                    let right = _mm512_set1_epi16((bit_number - 4).max(0) as i16);
                                    _mm512_srlv_epi16(_mm512_sllv_epi16(fifth[i], left), right)
                                };
                                let number = 2 * part as i32;
                                a = _mm512_ternarylogic_epi32::<0xf8>(a, place(number), bit);
                                b = _mm512_ternarylogic_epi32::<0xf8>(b, place(number + 1), bit);
                            }
                            store(group, a);
                            store(group + 8, b);
                        }
                    }
                }
                let byte = _mm512_set1_epi32(0xff);
                for half in 0..2 {
                    let (mut scales, mut mins) = (heads.scales[half], heads.mins[half]);
                    for i in 0..4 {
                        let place = panel.scales[half * 4 + i].as_mut_ptr().cast();
                        _mm512_store_si512(place, _mm512_and_si512(scales, byte));
                        scales = _mm512_srli_epi32::<8>(scales);
                    }
                    for i in 0..2 {
                        // The lowest two bytes as words.
                        let second =
                            _mm512_slli_epi32::<8>(_mm512_and_si512(mins, _mm512_set1_epi32(0xff00)));
                        let pair = _mm512_or_si512(_mm512_and_si512(mins, byte), second);
                        _mm512_store_si512(panel.mins[half * 2 + i].as_mut_ptr().cast(), pair);
                        mins = _mm512_srli_epi32::<16>(mins);
                    }
                }
            }
        }
        _mm512_store_ps(panel.d.as_mut_ptr(), heads.d);
        _mm512_store_ps(panel.dmin.as_mut_ptr(), heads.dmin);
    }
}

// ---------------------------------------------------------------------------------------------------
// Q8_0

/// The scales of sixteen rows at the block of Q8_0 at byte `at`.
///
/// # Safety
/// The rows must hold such a block there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn q8_0_scales(rows: &Rows16, at: usize) -> __m512 {
    // SAFETY: a block starts with its scale.
    let scale = |row: usize| unsafe { rows.0[row].add(at).cast::<i16>().read_unaligned() };
    let half = |first: usize| {
        _mm_setr_epi16(
            scale(first),
            scale(first + 1),
            scale(first + 2),
            scale(first + 3),
            scale(first + 4),
            scale(first + 5),
            scale(first + 6),
            scale(first + 7),
        )
    };
    _mm512_cvtph_ps(_mm256_set_m128i(half(8), half(0)))
}

/// Sixteen rows of up to eight blocks of Q8_0, unpacked so that lanes are rows.
#[repr(C, align(64))]
struct Q8_0Panel {
    /// Four consecutive weights of every row, as unsigned bytes with an offset of 128.
    lanes: [[u8; 64]; 64],
    /// The scale of every row in each block.
    d: [[f32; ROWS]; 8],
}

impl Q8_0Panel {
    fn new() -> Q8_0Panel {
        Q8_0Panel { lanes: [[0; 64]; 64], d: [[0.0; ROWS]; 8] }
    }

    /// Unpacks `count` blocks from byte `at` on.
    ///
    /// # Safety
    /// The rows must hold as many blocks of Q8_0 there.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn unpack(&mut self, rows: &Rows16, at: usize, count: usize) {
        let sign = _mm512_set1_epi8(-128);
        for block in 0..count {
            let at = at + block * 34;
            // SAFETY: the caller's promise; the stores stay inside the panel.
            unsafe {
                _mm512_store_ps(self.d[block].as_mut_ptr(), q8_0_scales(rows, at));
                for quad in 0..2 {
                    let dwords = four_dwords(rows, at + 2 + quad * 16);
                    for i in 0..4 {
                        let place = self.lanes[block * 8 + quad * 4 + i].as_mut_ptr();
                        _mm512_store_si512(place.cast(), _mm512_xor_si512(dwords[i], sign));
                    }
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn many_tokens_q8_0(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    let mut panel = Q8_0Panel::new();
    for chunk in (0..x.len()).step_by(TOKEN_CHUNK) {
        let tokens = chunk..x.len().min(chunk + TOKEN_CHUNK);
        for first in (0..w.rows).step_by(ROWS) {
            let rows = Rows16::new(w, first);
            let next_rows = w.row(first).as_ptr().wrapping_add(ROWS * w.row(0).len());
            for block in 0..x.width() {
                let count = 8.min(w.cols / 32 - 8 * block);
                let share = ROWS * 8 * 34;
                let steps = tokens.len().div_ceil(8);
                let mut ahead = Ahead::new(next_rows.wrapping_add(block * share), share, steps);
                // SAFETY: a row has a block for every 32 columns.
                unsafe { panel.unpack(&rows, block * 8 * 34, count) };
                let mut token = tokens.start;
                while token < tokens.end {
                    ahead.step();
                    let at = At { first, block, token };
                    token += match tokens.end - token {
                        8.. => multiply_q8_0::<8>(&panel, count, x, out, at),
                        4.. => multiply_q8_0::<4>(&panel, count, x, out, at),
                        2.. => multiply_q8_0::<2>(&panel, count, x, out, at),
                        _ => multiply_q8_0::<1>(&panel, count, x, out, at),
                    };
                }
            }
        }
    }
}

/// Adds the products of `count` blocks with `T` tokens to the output; returns `T`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn multiply_q8_0<const T: usize>(
    panel: &Q8_0Panel,
    count: usize,
    x: Rows<'_, Q8Panel>,
    out: &mut TileMut<'_, f32>,
    at: At,
) -> usize {
    let x: [&Q8Panel; T] = pick(x, at.token, at.block);
    let mask = tail_mask(out.cols() - at.first);
    let mut acc = [_mm512_setzero_ps(); T];
    if at.block > 0 {
        for t in 0..T {
            // SAFETY: the mask covers the row's length.
            acc[t] = unsafe { _mm512_maskz_loadu_ps(mask, out.row(at.token + t)[at.first..].as_ptr()) };
        }
    }
    for part in 0..count {
        let mut dots = [_mm512_setzero_si512(); T];
        for t in 0..T {
            // The contribution of the lanes' offset of 128.
            let excess = 128 * (i32::from(x[t].sums[2 * part]) + i32::from(x[t].sums[2 * part + 1]));
            dots[t] = _mm512_set1_epi32(-excess);
        }
        for group in part * 8..part * 8 + 8 {
            // SAFETY: it is one register long.
            let weights = unsafe { _mm512_load_si512(panel.lanes[group].as_ptr().cast()) };
            for t in 0..T {
                // SAFETY: a panel of activations has 64 groups of four.
                let four = unsafe { x[t].lanes.as_ptr().add(4 * group).cast::<i32>().read() };
                dots[t] = _mm512_dpbusd_epi32(dots[t], weights, _mm512_set1_epi32(four));
            }
        }
        // SAFETY: it is one register long.
        let d = unsafe { _mm512_load_ps(panel.d[part].as_ptr()) };
        for t in 0..T {
            let scale = _mm512_mul_ps(d, _mm512_set1_ps(x[t].scales[part]));
            acc[t] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dots[t]), acc[t]);
        }
    }
    for t in 0..T {
        // SAFETY: the mask covers the row's length.
        unsafe { _mm512_mask_storeu_ps(out.row(at.token + t)[at.first..].as_mut_ptr(), mask, acc[t]) };
    }
    T
}

// ---------------------------------------------------------------------------------------------------
// Floats

impl Vector for __m512 {
    const LANES: usize = 16;
    const SUMS: usize = 16;

    operations! {
        add(self, y) => _mm512_add_ps(self, y);
        sub(self, y) => _mm512_sub_ps(self, y);
        mul(self, y) => _mm512_mul_ps(self, y);
        mul_add(self, y, z) => _mm512_fmadd_ps(self, y, z);
        round(self) => _mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(self);
        scale_by_power(self, n) => scale_by_power(self, n);
        select_less(self, y, yes, no) =>
            _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self, y), yes);
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn splat(value: f32) -> __m512 {
        _mm512_set1_ps(value)
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn load_f16(from: *const f16) -> __m512 {
        // SAFETY: the caller's promise.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(from.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn load_bf16(from: *const bf16) -> __m512 {
        // SAFETY: the caller's promise.
        let words = unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(to, self) }
    }

    #[inline(always)]
    fn sum_across(v: &[__m512; LANES]) -> __m512 {
        // SAFETY: a register exists only where the processor has its instructions.
        unsafe { sum_across(v) }
    }
}

/// As [`Vector::scale_by_power`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn scale_by_power(x: __m512, n: __m512) -> __m512 {
    let n = _mm512_cvtps_epi32(n);
    let half = _mm512_srai_epi32::<1>(n);
    let power = |n| _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(n, _mm512_set1_epi32(127))));
    _mm512_mul_ps(_mm512_mul_ps(x, power(half)), power(_mm512_sub_epi32(n, half)))
}

/// A mask of the first `len` of sixteen lanes.
#[inline(always)]
fn tail_mask(len: usize) -> __mmask16 {
    if len >= 16 { 0xffff } else { (1 << len) - 1 }
}
