//! The kernels for CPUs with AVX2, fused multiply-adds and half floats (FMA, F16C).
//!
//! Products have two arrangements. For one token, lanes run along the row: two blocks of four rows at a time, because
//! memory is fastest with few streams, reduced across blocks by a transpose. The AVX-512 kernels use these, too. For
//! several tokens, eight rows are unpacked so that lanes are rows ([`Panel`]). Within a block all arithmetic is integer
//! and exact. Both arrangements then do the same float operations in block order, so both give the bits of [`scalar`].
//!
//! Without VNNI, a dot product is `maddubs`: unsigned weights times signed activations, added in pairs to 16 bits with
//! saturation. So lanes stay as small as their type stores them, and offsets are subtracted from the sums.
//!
//! Attention and products with floats are those of [`generic`](crate::generic), over a register of eight floats.
//! Kernels that are not worth writing by hand are the scalar ones, compiled for these instructions. Closures with these
//! instructions are called only from here: a library function such as `array::from_fn` is compiled without them and
//! would not inline the closure. Even `array::map` is not inlined in functions of this size, so arrays in loops are
//! written out.

// Loops over registers use indices, so that they are unrolled.
#![allow(clippy::needless_range_loop)]

pub(crate) mod lanes;
pub(crate) mod planes;
pub(crate) mod shared;
pub(crate) mod widened;

use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::DType;
use crate::compiled::compiled_scalar_kernels;
use crate::encoding::Encoding;
use crate::generic::{Cell, Vector, attention, operations, products};
use crate::quant::{Q4K, Q5K, Q6K, Quant};
use crate::scalar::{self, AttentionStep, LANES, RunningSoftmax};
use crate::tensor::{MatRef, Q8Panel, Rows, TileMut};

/// Rows that are computed together for several tokens: the number of 32-bit lanes of a register.
const ROWS: usize = 8;

/// Tokens whose activations stay in the second-level cache while all rows of a matrix are processed.
const TOKEN_CHUNK: usize = 128;

/// Whether this CPU has all instructions of this module.
pub fn available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// As [`scalar::matmul_f32`].
#[target_feature(enable = "avx2,fma,f16c")]
pub fn matmul_f32(w: MatRef<'_>, x: Rows<'_, f32>, out: &mut TileMut<'_, f32>) {
    match w.encoding {
        Encoding::Blocks(DType::F32) => matmul_floats::<f32>(w, x, out),
        Encoding::Blocks(DType::F16) => matmul_floats::<f16>(w, x, out),
        Encoding::Blocks(DType::BF16) => matmul_floats::<bf16>(w, x, out),
        _ => widened::matmul(w, x, out),
    }
}

/// As [`products::matmul_floats`].
#[target_feature(enable = "avx2,fma,f16c")]
fn matmul_floats<C: Cell>(w: MatRef<'_>, x: Rows<'_, f32>, out: &mut TileMut<'_, f32>) {
    let mut ahead = Ahead::new(w, 2);
    // SAFETY: a CPU that runs this function has its instructions.
    unsafe { products::matmul_floats::<__m256, C>(w, x, out, |bytes| ahead.advance(bytes)) }
}

/// As [`scalar::matmul_q8`].
#[target_feature(enable = "avx2,fma,f16c")]
pub fn matmul_q8(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    assert_eq!((out.rows(), out.cols()), (x.len(), w.rows));
    assert_eq!(x.width(), Q8Panel::count(w.cols));
    let Encoding::Blocks(dtype) = w.encoding else { return planes::matmul_q8(w, x, out) };
    match (dtype, x.len()) {
        (DType::Q8_0, 1) => one_token_q8_0(w, x.row(0), out.row(0)),
        (DType::Q8_0, _) => many_tokens_q8_0(w, x, out),
        (DType::Q4_K, 1) => one_token::<Q4K>(w, x.row(0), out.row(0)),
        (DType::Q4_K, _) => many_tokens::<Q4K>(w, x, out),
        (DType::Q5_K, 1) => one_token::<Q5K>(w, x.row(0), out.row(0)),
        (DType::Q5_K, _) => many_tokens::<Q5K>(w, x, out),
        (DType::Q6_K, 1) => one_token::<Q6K>(w, x.row(0), out.row(0)),
        (DType::Q6_K, _) => many_tokens::<Q6K>(w, x, out),
        (dtype, _) => lanes::with_lanes!(dtype, Q => shared::matmul::<Q>(w, x, out)),
    }
}

/// As [`scalar::matmul_transposed`].
#[target_feature(enable = "avx2,fma,f16c")]
pub fn matmul_transposed(w: MatRef<'_>, x: Rows<'_, f32>, out: &mut TileMut<'_, f32>) {
    scalar::matmul_transposed_by(w, x, out, |w, row, col, out| widened::widen(&w, row, col, out));
}

/// As [`scalar::attend`].
#[target_feature(enable = "avx2,fma,f16c")]
pub fn attend(step: &AttentionStep<'_>, running: &mut [RunningSoftmax], out: &mut [f32]) {
    if !attention::fits::<__m256>(step) {
        return scalar::attend(step, running, out);
    }
    // SAFETY: a CPU that runs this function has its instructions.
    unsafe { attention::attend::<__m256>(step, running, out) }
}

compiled_scalar_kernels!("avx2,fma,f16c");

// ---------------------------------------------------------------------------------------------------
// Eight blocks of a matrix

/// Eight blocks whose scales and sums go to the eight lanes of a register. Missing blocks are replaced by another one,
/// whose result is dropped.
pub(crate) type Eight = [*const u8; 8];

/// Four rows from `first` on.
#[inline(always)]
fn four_rows(w: MatRef<'_>, first: usize) -> [*const u8; 4] {
    let row = |i: usize| w.row((first + i).min(w.rows - 1)).as_ptr();
    [row(0), row(1), row(2), row(3)]
}

/// `count` blocks, one or two, of four rows: lane `4 · block + row`.
#[inline(always)]
fn two_blocks(rows: [*const u8; 4], block: usize, count: usize, bytes: usize) -> Eight {
    let first = |row: usize| rows[row].wrapping_add(block * bytes);
    let second = |row: usize| rows[row].wrapping_add((block + count - 1) * bytes);
    [first(0), first(1), first(2), first(3), second(0), second(1), second(2), second(3)]
}

/// Eight rows from `first` on.
#[inline(always)]
fn eight_rows(w: MatRef<'_>, first: usize) -> Eight {
    let row = |i: usize| w.row((first + i).min(w.rows - 1)).as_ptr();
    [row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7)]
}

/// The blocks at byte `at` of eight rows.
#[inline(always)]
fn eight_blocks(rows: &Eight, at: usize) -> Eight {
    let block = |row: usize| rows[row].wrapping_add(at);
    [block(0), block(1), block(2), block(3), block(4), block(5), block(6), block(7)]
}

/// Prefetches memory ahead of the computation, each cache line once and in order, which memory does fastest.
struct Ahead {
    next: *const u8,
    end: *const u8,
}

impl Ahead {
    /// For a computation that processes `rows` rows together. It prefetches the next ones.
    fn new(w: MatRef<'_>, rows: usize) -> Ahead {
        let start = w.row(0).as_ptr().wrapping_add(rows * w.row(0).len());
        Ahead { next: start, end: start }
    }

    /// Called once per block, so that prefetches are spread evenly.
    #[inline(always)]
    fn advance(&mut self, bytes: usize) {
        self.end = self.end.wrapping_add(bytes);
        while self.next < self.end {
            // SAFETY: a prefetch of any address is harmless.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.next.cast()) };
            self.next = self.next.wrapping_add(64);
        }
    }
}

/// Four consecutive dwords of eight blocks: vector `i` holds dword `i` of every block.
///
/// # Safety
/// Every block must have 16 bytes at `offset`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn four_dwords(blocks: &Eight, offset: usize) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    let load = |lane: usize| unsafe { _mm_loadu_si128(blocks[lane].add(offset).cast()) };
    let two = |i: usize| _mm256_set_m128i(load(i + 4), load(i));
    let (r0, r1, r2, r3) = (two(0), two(1), two(2), two(3));
    let (a, b) = (_mm256_unpacklo_epi32(r0, r1), _mm256_unpacklo_epi32(r2, r3));
    let (c, d) = (_mm256_unpackhi_epi32(r0, r1), _mm256_unpackhi_epi32(r2, r3));
    [
        _mm256_unpacklo_epi64(a, b),
        _mm256_unpackhi_epi64(a, b),
        _mm256_unpacklo_epi64(c, d),
        _mm256_unpackhi_epi64(c, d),
    ]
}

/// The f16 at `offset` of eight blocks.
///
/// # Safety
/// Every block must have two bytes at `offset`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn halves_at(blocks: &Eight, offset: usize) -> __m256 {
    // SAFETY: the caller's promise.
    let at = |lane: usize| unsafe { blocks[lane].add(offset).cast::<i16>().read_unaligned() };
    _mm256_cvtph_ps(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)))
}

/// The sums of eight vectors, one per lane. Lanes are added in the order of [`scalar::sum_lanes`].
macro_rules! sum_across {
    ($name:ident, $lane:ty, $add:ident, $to:ident, $from:ident) => {
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $name(v: &[$lane; 8]) -> $lane {
            let four = |i: usize| {
                let (a, b) = ($to(v[i]), $to(v[i + 4]));
                let low = _mm256_permute2x128_si256::<0x20>(a, b);
                $to($add($from(low), $from(_mm256_permute2x128_si256::<0x31>(a, b))))
            };
            let two = |i: usize| {
                let (a, b) = (four(i), four(i + 1));
                let sums = $add($from(_mm256_unpacklo_epi64(a, b)), $from(_mm256_unpackhi_epi64(a, b)));
                _mm256_castsi256_ps($to(sums))
            };
            let (a, b) = (two(0), two(2));
            let even = _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(a, b));
            let odd = _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(a, b));
            $add($from(even), $from(odd))
        }
    };
}

#[inline(always)]
fn same(v: __m256i) -> __m256i {
    v
}

sum_across!(sum_across_i32, __m256i, _mm256_add_epi32, same, same);
sum_across!(sum_across_f32, __m256, _mm256_add_ps, _mm256_castps_si256, _mm256_castsi256_ps);

// ---------------------------------------------------------------------------------------------------
// K types

/// The position of a quarter of a K block: 32 bytes of nibbles, which are 64 lanes.
struct Quarter {
    /// The offset of the nibbles.
    nibbles: usize,
    /// The offset of the 32 bytes with the lanes' upper bits, if the type has any.
    top: usize,
    /// Which 32 lanes of the block the low and the high nibbles are.
    places: [usize; 2],
}

#[inline(always)]
fn quarter<Q: Quant>(part: usize) -> Quarter {
    let in_order = [2 * part, 2 * part + 1];
    match Q::DTYPE {
        DType::Q4_K => Quarter { nibbles: 16 + 32 * part, top: 16, places: in_order },
        DType::Q5_K => Quarter { nibbles: 48 + 32 * part, top: 16, places: in_order },
        _ => {
            let place = part / 2 * 4 + part % 2;
            Quarter { nibbles: 32 * part, top: 128 + part / 2 * 32, places: [place, place + 2] }
        }
    }
}

/// The lanes of a quarter as unsigned bytes: those of the low nibbles and those of the high ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn join<Q: Quant>(nibbles: __m256i, top: __m256i, part: usize) -> [__m256i; 2] {
    let mask = _mm256_set1_epi8(0x0f);
    let low = _mm256_and_si256(nibbles, mask);
    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(nibbles), mask);
    // Shifts bits of `top` above a nibble. Bits that cross byte boundaries are masked out.
    let add = |nibble, left: i32, mask: i8| {
        let shifted = if left >= 0 {
            _mm256_sllv_epi32(top, _mm256_set1_epi32(left))
        } else {
            _mm256_srlv_epi32(top, _mm256_set1_epi32(-left))
        };
        _mm256_or_si256(nibble, _mm256_and_si256(shifted, _mm256_set1_epi8(mask)))
    };
    let part = part as i32;
    match Q::DTYPE {
        DType::Q4_K => [low, high],
        DType::Q5_K => [add(low, 4 - 2 * part, 0x10), add(high, 3 - 2 * part, 0x10)],
        _ => [add(low, 4 - part % 2 * 2, 0x30), add(high, -(part % 2 * 2), 0x30)],
    }
}

/// The scales of eight blocks, lane by lane.
struct Heads {
    d: __m256,
    dmin: __m256,
    /// Sub-scales 0–3 and 4–7 of each block, a byte each. Only Q4_K and Q5_K.
    scales: [__m256i; 2],
    /// Minima 0–3 and 4–7 of each block, a byte each. Only Q4_K and Q5_K.
    mins: [__m256i; 2],
}

/// # Safety
/// The blocks must be of `Q`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn heads<Q: Quant>(blocks: &Eight) -> Heads {
    let zero = _mm256_setzero_si256();
    if Q::DTYPE == DType::Q6_K {
        // SAFETY: the caller's promise.
        let d = unsafe { halves_at(blocks, 208) };
        return Heads { d, dmin: _mm256_setzero_ps(), scales: [zero; 2], mins: [zero; 2] };
    }
    // SAFETY: the caller's promise.
    let [floats, low_scales, low_mins, high] = unsafe { four_dwords(blocks, 0) };
    let (six, four, two) = (_mm256_set1_epi8(0x3f), _mm256_set1_epi8(0x0f), _mm256_set1_epi8(0x30));
    let join = |nibble, bits| {
        // The upper two bits of a byte, moved down to bits 4 and 5.
        let top = _mm256_and_si256(_mm256_srli_epi16::<2>(bits), two);
        _mm256_or_si256(_mm256_and_si256(nibble, four), top)
    };
    let to_float = |v| {
        let words = _mm256_packus_epi32(v, v);
        _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b1000>(words)))
    };
    Heads {
        d: to_float(_mm256_and_si256(floats, _mm256_set1_epi32(0xffff))),
        dmin: to_float(_mm256_srli_epi32::<16>(floats)),
        scales: [_mm256_and_si256(low_scales, six), join(high, low_scales)],
        mins: [_mm256_and_si256(low_mins, six), join(_mm256_srli_epi16::<4>(high), low_mins)],
    }
}

/// Bytes `a` and `b` of every dword, each as a signed word.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn words(v: __m256i, a: usize, b: usize) -> __m256i {
    // A byte index with its top bit set gives zero. The wanted byte goes to the top of its word.
    let first =
        _mm256_setr_epi32(0, 0x0400_0400, 0x0800_0800, 0x0c00_0c00, 0, 0x0400_0400, 0x0800_0800, 0x0c00_0c00);
    let pair = _mm256_set1_epi32((0x0080_0080 | a << 8 | b << 24) as i32);
    _mm256_srai_epi16::<8>(_mm256_shuffle_epi8(v, _mm256_or_si256(first, pair)))
}

// ---------------------------------------------------------------------------------------------------
// One token, K types

#[target_feature(enable = "avx2,fma,f16c")]
fn one_token<Q: Quant>(w: MatRef<'_>, x: &[Q8Panel], out: &mut [f32]) {
    let bytes = Q::DTYPE.block_bytes();
    let mut ahead = Ahead::new(w, 4);
    for first in (0..w.rows).step_by(4) {
        let rows = four_rows(w, first);
        let mut acc = _mm_setzero_ps();
        for (i, panels) in x.chunks(2).enumerate() {
            let blocks = two_blocks(rows, 2 * i, panels.len(), bytes);
            let x = [&panels[0], &panels[panels.len() - 1]];
            // SAFETY: the matrix has a block for every panel.
            let (heads, products) = unsafe {
                let heads = heads::<Q>(&blocks);
                let products = products::<Q>(&blocks, &heads, panels, &mut ahead);
                (heads, products)
            };
            let scales = _mm256_set_m128(_mm_set1_ps(x[1].scales[0]), _mm_set1_ps(x[0].scales[0]));
            let (d, products) = (_mm256_mul_ps(heads.d, scales), _mm256_cvtepi32_ps(products));
            if Q::HAS_MINS {
                let dmin = _mm256_mul_ps(heads.dmin, scales);
                let mins = _mm256_cvtepi32_ps(minima(&heads, x));
                for b in 0..panels.len() {
                    acc = _mm_fmadd_ps(half(d, b), half(products, b), acc);
                    acc = _mm_fnmadd_ps(half(dmin, b), half(mins, b), acc);
                }
            } else {
                for b in 0..panels.len() {
                    acc = _mm_fmadd_ps(half(d, b), half(products, b), acc);
                }
            }
        }
        store_four(acc, &mut out[first..]);
    }
}

/// The lanes of one block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn half(v: __m256, block: usize) -> __m128 {
    if block == 0 { _mm256_castps256_ps128(v) } else { _mm256_extractf128_ps::<1>(v) }
}

/// Stores the results of up to four rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_four(acc: __m128, out: &mut [f32]) {
    let mut four = [0.0; 4];
    // SAFETY: it is one register long.
    unsafe { _mm_storeu_ps(four.as_mut_ptr(), acc) };
    let rows = out.len().min(4);
    out[..rows].copy_from_slice(&four[..rows]);
}

/// `Σ scale · lane · activation` of four or eight blocks: one or two panels.
///
/// # Safety
/// The blocks must be of `Q`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn products<Q: Quant>(
    blocks: &Eight,
    heads: &Heads,
    panels: &[Q8Panel],
    ahead: &mut Ahead,
) -> __m256i {
    // Every sub-scale as a pair of words, so that one load broadcasts it to all lanes of a register.
    let mut pairs = [[0i32; 8]; 8];
    if Q::HAS_MINS {
        for (i, pairs) in pairs.iter_mut().enumerate() {
            let pair = words(heads.scales[i / 4], i % 4, i % 4);
            // SAFETY: it is one register long.
            unsafe { _mm256_storeu_si256(pairs.as_mut_ptr().cast(), pair) };
        }
    }
    let mut sums = [_mm256_setzero_si256(); 8];
    for lane in 0..4 * panels.len() {
        let (block, x) = (blocks[lane], &panels[lane / 4]);
        ahead.advance(Q::DTYPE.block_bytes());
        // SAFETY: the offsets stay inside a block, by the caller's promise.
        let load = |at: usize| unsafe { _mm256_loadu_si256(block.add(at).cast()) };
        // SAFETY: a panel has 256 lanes.
        let activations =
            |place: usize| unsafe { _mm256_loadu_si256(x.lanes.as_ptr().add(32 * place).cast()) };
        let (mut acc, mut scales) = (_mm256_setzero_si256(), [_mm256_setzero_si256(); 2]);
        if Q::DTYPE == DType::Q6_K {
            // SAFETY: the block has 16 scales at 192, and a panel 16 sums.
            let (words, x_sums) = unsafe {
                let words = _mm256_cvtepi8_epi16(_mm_loadu_si128(block.add(192).cast()));
                (words, _mm256_loadu_si256(x.sums.as_ptr().cast()))
            };
            // Lanes are stored with an offset of 32. This subtracts Σ 32 · scale · sum(activations), in two factors
            // that fit 16 bits.
            let less = _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_slli_epi16::<4>(x_sums));
            acc = _mm256_madd_epi16(_mm256_slli_epi16::<1>(words), less);
            scales = [
                _mm256_permute2x128_si256::<0x00>(words, words),
                _mm256_permute2x128_si256::<0x11>(words, words),
            ];
        }
        for part in 0..4 {
            let at = quarter::<Q>(part);
            let top = if Q::DTYPE == DType::Q4_K { _mm256_setzero_si256() } else { load(at.top) };
            let lanes = join::<Q>(load(at.nibbles), top, part);
            for i in 0..2 {
                let place = at.places[i];
                let dot = _mm256_maddubs_epi16(lanes[i], activations(place));
                let scale = if Q::DTYPE == DType::Q6_K {
                    // Each half of the register holds the sixteen lanes of one sub-scale.
                    let word = |i: usize| _mm_set1_epi16(((2 * i) | ((2 * i + 1) << 8)) as i16);
                    let index = _mm256_set_m128i(word(place % 4 * 2 + 1), word(place % 4 * 2));
                    _mm256_shuffle_epi8(scales[place / 4], index)
                } else {
                    _mm256_set1_epi32(pairs[place][lane])
                };
                acc = _mm256_add_epi32(acc, _mm256_madd_epi16(dot, scale));
            }
        }
        sums[lane] = acc;
    }
    sum_across_i32(&sums)
}

/// `Σ minimum · sum(activations)` of eight blocks.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn minima(heads: &Heads, panels: [&Q8Panel; 2]) -> __m256i {
    // SAFETY: a panel has 16 sums.
    let load =
        |panel: usize, at: usize| unsafe { _mm_loadu_si128(panels[panel].sums.as_ptr().add(at).cast()) };
    let both = |at: usize| _mm256_set_m128i(load(1, at), load(0, at));
    // The sum of 32 lanes fits sixteen bits.
    let sums = _mm256_hadd_epi16(both(0), both(8));
    let [a, b] = heads.mins;
    let first = _mm256_madd_epi16(words(a, 0, 1), _mm256_shuffle_epi32::<0x00>(sums));
    let second = _mm256_madd_epi16(words(a, 2, 3), _mm256_shuffle_epi32::<0x55>(sums));
    let third = _mm256_madd_epi16(words(b, 0, 1), _mm256_shuffle_epi32::<0xaa>(sums));
    let fourth = _mm256_madd_epi16(words(b, 2, 3), _mm256_shuffle_epi32::<0xff>(sums));
    _mm256_add_epi32(_mm256_add_epi32(first, second), _mm256_add_epi32(third, fourth))
}

// ---------------------------------------------------------------------------------------------------
// Several tokens, K types

/// Eight rows of one block, unpacked so that lanes are rows.
#[repr(C, align(32))]
struct Panel {
    /// Four consecutive weights of every row, as unsigned bytes.
    lanes: [[u8; 32]; 64],
    /// The sub-scales of every row, each as a pair of words: one vector for 32 weights, or for 16 if the type has that
    /// many.
    scales: [[i16; 2 * ROWS]; 16],
    /// The factors of the sums of activations: for each two sums of 16, a pair for every row.
    mins: [[i16; 2 * ROWS]; 8],
}

impl Panel {
    fn new() -> Panel {
        Panel { lanes: [[0; 32]; 64], scales: [[0; 2 * ROWS]; 16], mins: [[0; 2 * ROWS]; 8] }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn many_tokens<Q: Quant>(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    let bytes = Q::DTYPE.block_bytes();
    let mut panel = Panel::new();
    for chunk in (0..x.len()).step_by(TOKEN_CHUNK) {
        let tokens = chunk..x.len().min(chunk + TOKEN_CHUNK);
        let mut ahead = Ahead::new(w, ROWS);
        for first in (0..w.rows).step_by(ROWS) {
            let rows = eight_rows(w, first);
            for b in 0..x.width() {
                ahead.advance(ROWS * bytes);
                let blocks = eight_blocks(&rows, b * bytes);
                // SAFETY: a row has as many blocks as the activations have panels.
                let floats = unsafe { unpack::<Q>(&blocks, &mut panel) };
                let mut t = tokens.start;
                while t < tokens.end {
                    let at = At { first, panel: b, token: t };
                    match tokens.end - t {
                        4.. => t += multiply::<Q, 4>(&panel, floats, x, out, at),
                        2.. => t += multiply::<Q, 2>(&panel, floats, x, out, at),
                        _ => t += multiply::<Q, 1>(&panel, floats, x, out, at),
                    }
                }
            }
        }
    }
}

/// The position within the product.
#[derive(Clone, Copy)]
struct At {
    first: usize,
    panel: usize,
    token: usize,
}

impl At {
    /// The sums of token `t` so far.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn load(&self, out: &mut TileMut<'_, f32>, t: usize) -> __m256 {
        let out = &out.row(self.token + t)[self.first..];
        let mut eight = [0.0; ROWS];
        if self.panel > 0 {
            match out.first_chunk() {
                Some(out) => eight = *out,
                None => eight[..out.len()].copy_from_slice(out),
            }
        }
        // SAFETY: it is one register long.
        unsafe { _mm256_loadu_ps(eight.as_ptr()) }
    }

    /// Stores the sums of token `t` for the rows that exist.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn store(&self, out: &mut TileMut<'_, f32>, t: usize, sums: __m256) {
        let out = &mut out.row(self.token + t)[self.first..];
        let mut eight = [0.0; ROWS];
        // SAFETY: it is one register long.
        unsafe { _mm256_storeu_ps(eight.as_mut_ptr(), sums) };
        match out.first_chunk_mut() {
            Some(out) => *out = eight,
            None => out.copy_from_slice(&eight[..out.len()]),
        }
    }
}

/// Panel `panel` of `T` tokens from `first` on.
#[inline(always)]
fn pick<const T: usize>(x: Rows<'_, Q8Panel>, first: usize, panel: usize) -> [&Q8Panel; T] {
    std::array::from_fn(|t| &x.row(first + t)[panel])
}

/// Adds one block's products with `T` tokens to the output; returns `T`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn multiply<Q: Quant, const T: usize>(
    panel: &Panel,
    (d, dmin): (__m256, __m256),
    x: Rows<'_, Q8Panel>,
    out: &mut TileMut<'_, f32>,
    at: At,
) -> usize {
    // Groups of four weights that share a sub-scale, and how many of them have sums that fit 16 bits: with activations
    // up to 127, a group adds 2 · 15 · 127, 2 · 31 · 127 or 2 · 63 · 127.
    let (groups, run) = match Q::DTYPE {
        DType::Q4_K => (8, 8),
        DType::Q5_K => (8, 4),
        _ => (4, 2),
    };
    let x: [&Q8Panel; T] = pick(x, at.token, at.panel);
    let zero = _mm256_setzero_si256();
    let mut products = [zero; T];
    for first in (0..64).step_by(run) {
        let mut dots = [zero; T];
        for group in first..first + run {
            // SAFETY: it is one register long.
            let weights = unsafe { _mm256_load_si256(panel.lanes[group].as_ptr().cast()) };
            for t in 0..T {
                // SAFETY: a panel of activations has 64 groups of four.
                let four = unsafe { x[t].lanes.as_ptr().add(4 * group).cast::<i32>().read() };
                let dot = _mm256_maddubs_epi16(weights, _mm256_set1_epi32(four));
                dots[t] = _mm256_add_epi16(dots[t], dot);
            }
        }
        // SAFETY: it is one register long.
        let scales = unsafe { _mm256_load_si256(panel.scales[first / groups].as_ptr().cast()) };
        for t in 0..T {
            products[t] = _mm256_add_epi32(products[t], _mm256_madd_epi16(dots[t], scales));
        }
    }
    let mut mins = [zero; T];
    for (pair, factors) in panel.mins.iter().enumerate() {
        // SAFETY: it is one register long.
        let factors = unsafe { _mm256_load_si256(factors.as_ptr().cast()) };
        for t in 0..T {
            // SAFETY: a panel of activations has eight pairs of sums, aligned to four bytes.
            let sums = unsafe { x[t].sums.as_ptr().add(2 * pair).cast::<i32>().read() };
            mins[t] = _mm256_add_epi32(mins[t], _mm256_madd_epi16(factors, _mm256_set1_epi32(sums)));
        }
    }
    for t in 0..T {
        let scale = _mm256_set1_ps(x[t].scales[0]);
        let d = _mm256_mul_ps(d, scale);
        let before = at.load(out, t);
        let after = if Q::HAS_MINS {
            let acc = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(products[t]), before);
            _mm256_fnmadd_ps(_mm256_mul_ps(dmin, scale), _mm256_cvtepi32_ps(mins[t]), acc)
        } else {
            // The factors are those of the lanes' offset.
            _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(_mm256_sub_epi32(products[t], mins[t])), before)
        };
        at.store(out, t, after);
    }
    T
}

/// Unpacks eight rows of one block; returns their scales and the scales of their minima.
///
/// # Safety
/// The blocks must be of `Q`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<Q: Quant>(blocks: &Eight, panel: &mut Panel) -> (__m256, __m256) {
    // SAFETY: the offsets stay inside a block, and the stores inside the panel.
    unsafe {
        let heads = heads::<Q>(blocks);
        let mut store = |group: usize, v| _mm256_store_si256(panel.lanes[group].as_mut_ptr().cast(), v);
        for quad in 0..2 {
            let mut top = [_mm256_setzero_si256(); 4];
            for part in 0..4 {
                let at = quarter::<Q>(part);
                // Q5_K has one vector of upper bits, Q6_K has one for every second part.
                if Q::DTYPE == DType::Q5_K && part == 0 || Q::DTYPE == DType::Q6_K && part % 2 == 0 {
                    top = four_dwords(blocks, at.top + 16 * quad);
                }
                let nibbles = four_dwords(blocks, at.nibbles + 16 * quad);
                for i in 0..4 {
                    let [low, high] = join::<Q>(nibbles[i], top[i], part);
                    store(8 * at.places[0] + 4 * quad + i, low);
                    store(8 * at.places[1] + 4 * quad + i, high);
                }
            }
        }
        let mut scale = |i: usize, v| _mm256_store_si256(panel.scales[i].as_mut_ptr().cast(), v);
        let mut min = |i: usize, v| _mm256_store_si256(panel.mins[i].as_mut_ptr().cast(), v);
        if Q::DTYPE == DType::Q6_K {
            let scales = four_dwords(blocks, 192);
            for four in 0..4 {
                for i in 0..4 {
                    scale(4 * four + i, words(scales[four], i, i));
                }
                for i in 0..2 {
                    // Lanes are stored with an offset of 32.
                    min(2 * four + i, _mm256_slli_epi16::<5>(words(scales[four], 2 * i, 2 * i + 1)));
                }
            }
        } else {
            for i in 0..8 {
                scale(i, words(heads.scales[i / 4], i % 4, i % 4));
                min(i, words(heads.mins[i / 4], i % 4, i % 4));
            }
        }
        (heads.d, heads.dmin)
    }
}

// ---------------------------------------------------------------------------------------------------
// Q8_0

/// Sums of four products of signed bytes. A weight's sign is moved to its activation, which is at most 127, so negation
/// cannot overflow. Two times 128 · 127 fit 16 bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_signed(weights: __m256i, x: __m256i) -> __m256i {
    let dot = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
    _mm256_madd_epi16(dot, _mm256_set1_epi16(1))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn one_token_q8_0(w: MatRef<'_>, x: &[Q8Panel], out: &mut [f32]) {
    let count = w.cols / 32;
    let mut ahead = Ahead::new(w, 4);
    for first in (0..w.rows).step_by(4) {
        let rows = four_rows(w, first);
        let mut acc = _mm_setzero_ps();
        for block in (0..count).step_by(2) {
            let here = 2.min(count - block);
            let blocks = two_blocks(rows, block, here, 34);
            ahead.advance(4 * here * 34);
            // Two consecutive blocks are in one panel, which is padded with zeros.
            let (panel, part) = (&x[block / 8], block % 8);
            let mut sums = [_mm256_setzero_si256(); 8];
            for lane in 0..8 {
                // SAFETY: 32 lanes follow the scale of a block, and a panel has as many for each part.
                sums[lane] = unsafe {
                    let x = panel.lanes.as_ptr().add(32 * (part + lane / 4));
                    dot_signed(_mm256_loadu_si256(blocks[lane].add(2).cast()), _mm256_loadu_si256(x.cast()))
                };
            }
            let products = _mm256_cvtepi32_ps(sum_across_i32(&sums));
            let scales =
                _mm256_set_m128(_mm_set1_ps(panel.scales[part + 1]), _mm_set1_ps(panel.scales[part]));
            // SAFETY: a block starts with its scale.
            let d = _mm256_mul_ps(unsafe { halves_at(&blocks, 0) }, scales);
            for b in 0..here {
                acc = _mm_fmadd_ps(half(d, b), half(products, b), acc);
            }
        }
        store_four(acc, &mut out[first..]);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn many_tokens_q8_0(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    // The blocks that share a panel of activations, unpacked so that lanes are rows: four weights of every row per
    // register, and the scales.
    let mut weights = [[_mm256_setzero_si256(); 4]; 16];
    let mut d = [_mm256_setzero_ps(); 8];
    for chunk in (0..x.len()).step_by(TOKEN_CHUNK) {
        let tokens = chunk..x.len().min(chunk + TOKEN_CHUNK);
        let mut ahead = Ahead::new(w, ROWS);
        for first in (0..w.rows).step_by(ROWS) {
            let rows = eight_rows(w, first);
            for panel in 0..x.width() {
                let count = 8.min(w.cols / 32 - 8 * panel);
                for b in 0..count {
                    ahead.advance(ROWS * 34);
                    let blocks = eight_blocks(&rows, (8 * panel + b) * 34);
                    // SAFETY: a row has a block for every 32 columns.
                    unsafe {
                        d[b] = halves_at(&blocks, 0);
                        weights[2 * b] = four_dwords(&blocks, 2);
                        weights[2 * b + 1] = four_dwords(&blocks, 18);
                    }
                }
                let (weights, d) = (&weights[..2 * count], &d[..count]);
                let mut t = tokens.start;
                while t < tokens.end {
                    let at = At { first, panel, token: t };
                    match tokens.end - t {
                        4.. => t += multiply_q8_0::<4>(weights, d, x, out, at),
                        2.. => t += multiply_q8_0::<2>(weights, d, x, out, at),
                        _ => t += multiply_q8_0::<1>(weights, d, x, out, at),
                    }
                }
            }
        }
    }
}

/// Adds one panel's products with `T` tokens to the output; returns `T`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn multiply_q8_0<const T: usize>(
    weights: &[[__m256i; 4]],
    d: &[__m256],
    x: Rows<'_, Q8Panel>,
    out: &mut TileMut<'_, f32>,
    at: At,
) -> usize {
    let x: [&Q8Panel; T] = pick(x, at.token, at.panel);
    let mut acc = [_mm256_setzero_ps(); T];
    for t in 0..T {
        acc[t] = at.load(out, t);
    }
    for (part, (&d, weights)) in d.iter().zip(weights.as_chunks::<2>().0).enumerate() {
        let mut dots = [_mm256_setzero_si256(); T];
        for group in 0..8 {
            for t in 0..T {
                // SAFETY: a panel of activations has eight groups of four in each of its parts.
                let four = unsafe { x[t].lanes.as_ptr().add(part * 32 + 4 * group).cast::<i32>().read() };
                let dot = dot_signed(weights[group / 4][group % 4], _mm256_set1_epi32(four));
                dots[t] = _mm256_add_epi32(dots[t], dot);
            }
        }
        for t in 0..T {
            let scale = _mm256_mul_ps(d, _mm256_set1_ps(x[t].scales[part]));
            acc[t] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(dots[t]), acc[t]);
        }
    }
    for t in 0..T {
        at.store(out, t, acc[t]);
    }
    T
}

// ---------------------------------------------------------------------------------------------------
// Floats

impl Vector for __m256 {
    const LANES: usize = 8;
    const SUMS: usize = 8;

    operations! {
        add(self, y) => _mm256_add_ps(self, y);
        sub(self, y) => _mm256_sub_ps(self, y);
        mul(self, y) => _mm256_mul_ps(self, y);
        mul_add(self, y, z) => _mm256_fmadd_ps(self, y, z);
        round(self) => _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self);
        scale_by_power(self, n) => scale_by_power(self, n);
        select_less(self, y, yes, no) => _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(self, y));
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn splat(value: f32) -> __m256 {
        _mm256_set1_ps(value)
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(from: *const f32) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_f16(from: *const f16) -> __m256 {
        // SAFETY: the caller's promise.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(from.cast()) })
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_bf16(from: *const bf16) -> __m256 {
        // SAFETY: the caller's promise.
        let words = unsafe { _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(to, self) }
    }

    #[inline(always)]
    fn sum_across(v: &[__m256; LANES]) -> __m256 {
        // SAFETY: a register exists only where the processor has its instructions.
        unsafe { sum_across_f32(v.first_chunk().expect("eight vectors")) }
    }
}

/// As [`Vector::scale_by_power`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scale_by_power(x: __m256, n: __m256) -> __m256 {
    let n = _mm256_cvtps_epi32(n);
    let half = _mm256_srai_epi32::<1>(n);
    let power = |n| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))));
    _mm256_mul_ps(_mm256_mul_ps(x, power(half)), power(_mm256_sub_epi32(n, half)))
}
