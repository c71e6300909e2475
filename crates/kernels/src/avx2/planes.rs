//! Products with matrices in planes: affine codes of all widths, and MXFP4.
//!
//! An encoding unpacks 32 lanes at a time to unsigned bytes in the order of the row ([`GroupLanes`]). All encodings
//! share the products. Integer sums are exact, so lanes may have a constant offset, and the offset times the sum of the
//! activations is subtracted.

// Loops over registers use indices, so that they are unrolled.
#![allow(clippy::needless_range_loop)]

use super::*;
use crate::quant::fp4::{E2M1, half_of_power};
use crate::quant::planes::float_at;

/// An encoding whose lanes are unpacked 32 at a time.
pub(crate) trait GroupLanes {
    /// Bytes of 32 codes.
    const BYTES: usize;
    /// The number to add to a lane.
    const OFFSET: i32;
    /// The largest lane.
    const LARGEST: u8;
    /// Whether there are biases.
    const BIASES: bool;

    /// The 32 lanes of the codes at `codes`, as unsigned bytes.
    ///
    /// # Safety
    /// There must be [`BYTES`](Self::BYTES) bytes, and the processor must have the instructions of this module.
    unsafe fn lanes(codes: *const u8) -> __m256i;
}

/// Codes of `BITS` bits.
pub(crate) struct Codes<const BITS: usize>;

impl<const BITS: usize> Codes<BITS> {
    /// The two bytes that hold each code, as a shuffle pattern: a code ends at the latest in the byte after the one in
    /// which it starts. The first half of the result is for codes 0–7 and 16–23, the second for the others.
    const WINDOWS: [[u8; 32]; 2] = {
        let mut out = [[0; 32]; 2];
        let mut i = 0;
        while i < 32 {
            // The upper half of a register holds the last 16 bytes of the codes, or all if there are fewer.
            let start = if i >= 16 && 4 * BITS > 16 { 4 * BITS - 16 } else { 0 };
            let byte = i * BITS / 8 - start;
            let place = i / 16 * 16 + i % 8 * 2;
            out[i / 8 % 2][place] = byte as u8;
            // A code that ends with the last byte needs no byte after it.
            out[i / 8 % 2][place + 1] = if byte == 15 { 0x80 } else { byte as u8 + 1 };
            i += 1;
        }
        out
    };

    /// Shifts each code to the top of its two bytes.
    const FACTORS: [[u16; 16]; 2] = {
        let mut out = [[0; 16]; 2];
        let mut i = 0;
        while i < 32 {
            out[i / 8 % 2][i / 16 * 8 + i % 8] = 1 << (16 - BITS - i * BITS % 8);
            i += 1;
        }
        out
    };
}

impl<const BITS: usize> GroupLanes for Codes<BITS> {
    const BYTES: usize = 4 * BITS;
    const OFFSET: i32 = 0;
    const LARGEST: u8 = 0xff >> (8 - BITS);
    const BIASES: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn lanes(codes: *const u8) -> __m256i {
        // SAFETY: the loads end with the `4 · BITS` bytes that the caller promises; the tables are one register long.
        unsafe {
            if BITS == 8 {
                return _mm256_loadu_si256(codes.cast());
            }
            if BITS == 4 {
                // Every byte becomes a word, whose two bytes are the nibbles.
                let words = _mm256_cvtepu8_epi16(_mm_loadu_si128(codes.cast()));
                let both = _mm256_or_si256(words, _mm256_slli_epi16::<4>(words));
                return _mm256_and_si256(both, _mm256_set1_epi8(15));
            }
            let bytes = match BITS {
                2 => _mm256_broadcastsi128_si256(_mm_loadl_epi64(codes.cast())),
                3 => {
                    let first = _mm_loadl_epi64(codes.cast());
                    let last = codes.add(8).cast::<i32>().read_unaligned();
                    _mm256_broadcastsi128_si256(_mm_insert_epi32::<2>(first, last))
                }
                _ => _mm256_set_m128i(
                    _mm_loadu_si128(codes.add(4 * BITS - 16).cast()),
                    _mm_loadu_si128(codes.cast()),
                ),
            };
            let words = |half: usize| {
                let window = _mm256_loadu_si256(Self::WINDOWS[half].as_ptr().cast());
                let factors = _mm256_loadu_si256(Self::FACTORS[half].as_ptr().cast());
                let top = _mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, window), factors);
                _mm256_srl_epi16(top, _mm_cvtsi32_si128(16 - BITS as i32))
            };
            _mm256_packus_epi16(words(0), words(1))
        }
    }
}

/// FP4 numbers, doubled, with an offset so that they start at zero.
pub(crate) struct Fp4;

impl GroupLanes for Fp4 {
    const BYTES: usize = 16;
    const OFFSET: i32 = -12;
    const LARGEST: u8 = 24;
    const BIASES: bool = false;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn lanes(codes: *const u8) -> __m256i {
        // SAFETY: the caller's promise; the table is one register long.
        unsafe {
            let table = _mm_add_epi8(_mm_loadu_si128(E2M1.as_ptr().cast()), _mm_set1_epi8(12));
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), Codes::<4>::lanes(codes))
        }
    }
}

/// Runs `$body` with `$l` bound to the unpacker of an encoding in groups and `$group` to its lanes in a group.
macro_rules! with_group_lanes {
    ($encoding:expr, $l:ident, $group:ident => $body:expr) => {{
        use $crate::avx2::planes::{Codes, Fp4};
        use $crate::encoding::{Affine, Encoding, MXFP4_GROUP};
        macro_rules! with {
            ($lanes:ty, $lanes_in_group:expr) => {{
                type $l = $lanes;
                let $group = $lanes_in_group;
                $body
            }};
        }
        match $encoding {
            Encoding::Affine(Affine { bits: 2, group, .. }) => with!(Codes<2>, group),
            Encoding::Affine(Affine { bits: 3, group, .. }) => with!(Codes<3>, group),
            Encoding::Affine(Affine { bits: 4, group, .. }) => with!(Codes<4>, group),
            Encoding::Affine(Affine { bits: 5, group, .. }) => with!(Codes<5>, group),
            Encoding::Affine(Affine { bits: 6, group, .. }) => with!(Codes<6>, group),
            Encoding::Affine(Affine { bits: 8, group, .. }) => with!(Codes<8>, group),
            Encoding::Mxfp4 => with!(Fp4, MXFP4_GROUP),
            other => panic!("{other} is not in groups"),
        }
    }};
}
pub(crate) use with_group_lanes;

/// As [`scalar::matmul_q8`], for matrices in planes.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn matmul_q8(w: MatRef<'_>, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    with_group_lanes!(w.encoding, L, group => match (x.len(), group) {
        (1, 32) => one_token::<L, 1>(w, x.row(0), out.row(0)),
        (1, 64) => one_token::<L, 2>(w, x.row(0), out.row(0)),
        (1, _) => one_token::<L, 4>(w, x.row(0), out.row(0)),
        _ => many_tokens::<L>(w, group, x, out),
    });
}

/// Writes the scales of a row's groups from `first` on, and their biases if it has any, to column `lane` of the tables.
pub(crate) fn floats_of_row<const N: usize>(
    w: MatRef<'_>,
    row: usize,
    first: usize,
    lane: usize,
    scales: &mut [[f32; N]],
    biases: &mut [[f32; N]],
) {
    let fill = |plane: &[u8], dtype: DType, out: &mut [[f32; N]]| {
        let size = dtype.block_bytes();
        let values = plane[first * size..][..out.len() * size].chunks_exact(size).zip(out);
        // The type is matched once, not for every number.
        match dtype {
            DType::BF16 => {
                values
                    .for_each(|(b, out)| out[lane] = f32::from_bits(u32::from_le_bytes([0, 0, b[0], b[1]])));
            }
            DType::F8_E8M0 => values.for_each(|(b, out)| out[lane] = half_of_power(b[0])),
            _ => values.for_each(|(b, out)| out[lane] = float_at(dtype, b, 0)),
        }
    };
    match w.encoding {
        Encoding::Affine(affine) => {
            fill(w.scales(row), affine.scales, scales);
            fill(w.biases(row), affine.scales, biases);
        }
        _ => fill(w.scales(row), DType::F8_E8M0, scales),
    }
}

/// Like [`dot_signed`], for lanes that need all eight bits: 128 is subtracted from them first.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_wide(lanes: __m256i, x: __m256i) -> __m256i {
    dot_signed(_mm256_xor_si256(lanes, _mm256_set1_epi8(-128)), x)
}

/// Whether a pair of products does not fit sixteen bits.
const fn is_wide<L: GroupLanes>() -> bool {
    L::LARGEST as i32 * 2 * 127 > i16::MAX as i32
}

/// The number to add to a lane in the form that products use.
const fn offset<L: GroupLanes>() -> i32 {
    if is_wide::<L>() { L::OFFSET + 128 } else { L::OFFSET }
}

// ---------------------------------------------------------------------------------------------------
// One token

/// The scales or biases of four rows.
#[derive(Clone, Copy)]
struct Floats {
    rows: [*const u8; 4],
    dtype: DType,
}

impl Floats {
    fn new<'a>(w: MatRef<'_>, first: usize, plane: impl Fn(usize) -> &'a [u8]) -> Floats {
        let row = |i: usize| plane((first + i).min(w.rows - 1)).as_ptr();
        let dtype = match w.encoding {
            Encoding::Affine(affine) => affine.scales,
            _ => DType::F8_E8M0,
        };
        Floats { rows: [row(0), row(1), row(2), row(3)], dtype }
    }

    /// The floats of `N` groups, one or two, starting with `index`: lane `4 · group + row`.
    ///
    /// # Safety
    /// The rows must have as many.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn get<const N: usize>(&self, index: usize) -> __m256 {
        let [a, b, c, d] = self.rows;
        // A macro, because a closure that takes closures would not be inlined.
        macro_rules! four {
            ($at:expr) => {
                _mm_setr_epi32($at(a), $at(b), $at(c), $at(d))
            };
        }
        // SAFETY: the caller's promise.
        let byte = |row: *const u8, at: usize| i32::from(unsafe { row.add(at).read() });
        // SAFETY: as above.
        let word =
            |row: *const u8, at: usize| i32::from(unsafe { row.add(at).cast::<u16>().read_unaligned() });
        // SAFETY: as above.
        let dword = |row: *const u8, at: usize| unsafe { row.add(at).cast::<i32>().read_unaligned() };
        // Both groups of a row in one load: two halves of a dword.
        let halves = || match N {
            2 => four!(|row| dword(row, 2 * index)),
            _ => four!(|row| word(row, 2 * index)),
        };
        match self.dtype {
            DType::BF16 => {
                let pairs = halves();
                let high = _mm_and_si128(pairs, _mm_set1_epi32(0xffff_0000_u32 as i32));
                _mm256_castsi256_ps(_mm256_set_m128i(high, _mm_slli_epi32::<16>(pairs)))
            }
            DType::F16 => {
                let pairs = halves();
                let low = _mm_and_si128(pairs, _mm_set1_epi32(0xffff));
                _mm256_cvtph_ps(_mm_packus_epi32(low, _mm_srli_epi32::<16>(pairs)))
            }
            DType::F32 => {
                let group = |g: usize| four!(|row| dword(row, 4 * (index + g)));
                _mm256_castsi256_ps(_mm256_set_m128i(group(N - 1), group(0)))
            }
            _ => {
                let group = |g: usize| four!(|row| byte(row, index + g));
                let exponents = _mm256_set_m128i(group(N - 1), group(0));
                // As `fp4::half_of_power`.
                let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(exponents, _mm256_set1_epi32(1)));
                let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x0020_0000), exponents);
                let is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), exponents);
                _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, is_small))
            }
        }
    }
}

/// Four rows of a matrix.
struct FourRows {
    codes: [*const u8; 4],
    scales: Floats,
    biases: Floats,
}

/// Products with groups of `32 · PARTS` lanes.
#[target_feature(enable = "avx2,fma,f16c")]
fn one_token<L: GroupLanes, const PARTS: usize>(w: MatRef<'_>, x: &[Q8Panel], out: &mut [f32]) {
    let count = w.cols / (32 * PARTS);
    let mut ahead = Ahead::new(w, 4);
    for first in (0..w.rows).step_by(4) {
        let rows = FourRows {
            codes: four_rows(w, first),
            scales: Floats::new(w, first, |row| w.scales(row)),
            biases: Floats::new(w, first, |row| if L::BIASES { w.biases(row) } else { &[] }),
        };
        let mut acc = _mm_setzero_ps();
        for g in (0..count).step_by(2) {
            // Two groups that start at an even one are in the same panel.
            let panel = &x[g * PARTS / 8];
            ahead.advance(4 * 2.min(count - g) * PARTS * L::BYTES);
            // SAFETY: the rows have that many groups.
            acc = unsafe {
                match count - g {
                    1 => add_groups::<L, PARTS, 1>(&rows, panel, g, acc),
                    _ => add_groups::<L, PARTS, 2>(&rows, panel, g, acc),
                }
            };
        }
        store_four(acc, &mut out[first..]);
    }
}

/// Adds the products of `N` groups of four rows, one or two, from group `g` on.
///
/// # Safety
/// The rows must have that many groups.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_groups<L: GroupLanes, const PARTS: usize, const N: usize>(
    rows: &FourRows,
    panel: &Q8Panel,
    g: usize,
    mut acc: __m128,
) -> __m128 {
    // The number of parts whose added products fit 16 bits.
    let run = (i16::MAX as usize / (2 * 127 * L::LARGEST as usize)).clamp(1, PARTS);
    let first = g * PARTS % 8;
    let mut sums = [_mm256_setzero_si256(); 8];
    for group in 0..N {
        for row in 0..4 {
            let (mut products, mut words) = (_mm256_setzero_si256(), _mm256_setzero_si256());
            for part in 0..PARTS {
                let at = group * PARTS + part;
                // SAFETY: the row has the codes of the group, and a panel 256 lanes.
                let (lanes, x) = unsafe {
                    let codes = rows.codes[row].add((g * PARTS + at) * L::BYTES);
                    let x = panel.lanes.as_ptr().add((first + at) * 32);
                    (L::lanes(codes), _mm256_load_si256(x.cast()))
                };
                if is_wide::<L>() {
                    products = _mm256_add_epi32(products, dot_wide(lanes, x));
                } else {
                    words = _mm256_add_epi16(words, _mm256_maddubs_epi16(lanes, x));
                    if part % run == run - 1 || part == PARTS - 1 {
                        let dwords = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
                        products = _mm256_add_epi32(products, dwords);
                        words = _mm256_setzero_si256();
                    }
                }
            }
            sums[4 * group + row] = products;
        }
    }
    let products = sum_across_i32(&sums);
    let sum = |group: usize| panel.sum_of((first + group * PARTS) * 32, PARTS * 32);
    let scale = |group: usize| panel.scales[first + group * PARTS];
    let x_sums = _mm256_set_m128i(_mm_set1_epi32(sum(N - 1)), _mm_set1_epi32(sum(0)));
    let x_scales = _mm256_set_m128(_mm_set1_ps(scale(N - 1)), _mm_set1_ps(scale(0)));
    let shift = _mm256_mullo_epi32(x_sums, _mm256_set1_epi32(offset::<L>()));
    let products = _mm256_cvtepi32_ps(_mm256_add_epi32(products, shift));
    // SAFETY: the caller's promise.
    let d = _mm256_mul_ps(unsafe { rows.scales.get::<N>(g) }, x_scales);
    if L::BIASES {
        // SAFETY: as above.
        let bias = _mm256_mul_ps(unsafe { rows.biases.get::<N>(g) }, x_scales);
        let x_sums = _mm256_cvtepi32_ps(x_sums);
        for group in 0..N {
            acc = _mm_fmadd_ps(half(d, group), half(products, group), acc);
            acc = _mm_fmadd_ps(half(bias, group), half(x_sums, group), acc);
        }
    } else {
        for group in 0..N {
            acc = _mm_fmadd_ps(half(d, group), half(products, group), acc);
        }
    }
    acc
}

// ---------------------------------------------------------------------------------------------------
// Several tokens

/// Eight rows of the groups that share a panel of activations, unpacked so that lanes are rows.
#[repr(C, align(32))]
struct GroupPanel {
    /// Four consecutive lanes of every row.
    lanes: [[u8; 32]; 64],
    /// The scales of every row, by group.
    scales: [[f32; ROWS]; 8],
    /// The biases of every row, by group.
    biases: [[f32; ROWS]; 8],
}

impl GroupPanel {
    fn new() -> GroupPanel {
        GroupPanel { lanes: [[0; 32]; 64], scales: [[0.0; ROWS]; 8], biases: [[0.0; ROWS]; 8] }
    }

    /// Unpacks `lanes` lanes of eight rows, from the start of a panel on.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn unpack<L: GroupLanes>(
        &mut self,
        w: MatRef<'_>,
        group: usize,
        first: usize,
        panel: usize,
        lanes: usize,
    ) {
        let rows = eight_rows(w, first);
        let mut plain = [[0u8; 32]; ROWS];
        for part in 0..lanes / 32 {
            for (row, plain) in rows.iter().zip(&mut plain) {
                // SAFETY: the row has the codes of all its lanes.
                unsafe {
                    let lanes = L::lanes(row.add((panel * 8 + part) * L::BYTES));
                    _mm256_storeu_si256(plain.as_mut_ptr().cast(), lanes);
                }
            }
            let block = |row: usize| plain[row].as_ptr();
            let blocks = [block(0), block(1), block(2), block(3), block(4), block(5), block(6), block(7)];
            for half in 0..2 {
                // SAFETY: every row of `plain` has 32 bytes, and the panel room for eight vectors in each part.
                unsafe {
                    let dwords = four_dwords(&blocks, 16 * half);
                    for i in 0..4 {
                        let place = self.lanes[part * 8 + half * 4 + i].as_mut_ptr();
                        _mm256_store_si256(place.cast(), dwords[i]);
                    }
                }
            }
        }
        let (groups, index) = (lanes / group, panel * (Q8Panel::LEN / group));
        for lane in 0..ROWS {
            let row = (first + lane).min(w.rows - 1);
            floats_of_row(w, row, index, lane, &mut self.scales[..groups], &mut self.biases[..groups]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn many_tokens<L: GroupLanes>(w: MatRef<'_>, group: usize, x: Rows<'_, Q8Panel>, out: &mut TileMut<'_, f32>) {
    let mut weights = GroupPanel::new();
    for chunk in (0..x.len()).step_by(TOKEN_CHUNK) {
        let tokens = chunk..x.len().min(chunk + TOKEN_CHUNK);
        let mut ahead = Ahead::new(w, ROWS);
        for first in (0..w.rows).step_by(ROWS) {
            for panel in 0..x.width() {
                let lanes = Q8Panel::LEN.min(w.cols - panel * Q8Panel::LEN);
                ahead.advance(ROWS * lanes / 32 * L::BYTES);
                weights.unpack::<L>(w, group, first, panel, lanes);
                let mut t = tokens.start;
                while t < tokens.end {
                    let at = At { first, panel, token: t };
                    match tokens.end - t {
                        4.. => t += multiply::<L, 4>(&weights, group, lanes / group, x, out, at),
                        2.. => t += multiply::<L, 2>(&weights, group, lanes / group, x, out, at),
                        _ => t += multiply::<L, 1>(&weights, group, lanes / group, x, out, at),
                    }
                }
            }
        }
    }
}

/// Adds the products of `count` groups with `T` tokens to the output; returns `T`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn multiply<L: GroupLanes, const T: usize>(
    weights: &GroupPanel,
    group: usize,
    count: usize,
    x: Rows<'_, Q8Panel>,
    out: &mut TileMut<'_, f32>,
    at: At,
) -> usize {
    let x: [&Q8Panel; T] = pick(x, at.token, at.panel);
    // The number of vectors of lanes whose added products fit 16 bits; a group has a multiple of eight.
    let run = match L::LARGEST {
        0..=16 => 8,
        17..=32 => 4,
        33..=64 => 2,
        _ => 1,
    };
    let mut acc = [_mm256_setzero_ps(); T];
    for t in 0..T {
        acc[t] = at.load(out, t);
    }
    for g in 0..count {
        let mut dots = [_mm256_setzero_si256(); T];
        for first in (g * group / 4..(g + 1) * group / 4).step_by(run) {
            let mut words = [_mm256_setzero_si256(); T];
            for four in first..first + run {
                // SAFETY: it is one register long.
                let lanes = unsafe { _mm256_load_si256(weights.lanes[four].as_ptr().cast()) };
                for t in 0..T {
                    // SAFETY: a panel of activations has 64 groups of four.
                    let four = unsafe { x[t].lanes.as_ptr().add(4 * four).cast::<i32>().read() };
                    let four = _mm256_set1_epi32(four);
                    if is_wide::<L>() {
                        dots[t] = _mm256_add_epi32(dots[t], dot_wide(lanes, four));
                    } else {
                        words[t] = _mm256_add_epi16(words[t], _mm256_maddubs_epi16(lanes, four));
                    }
                }
            }
            if !is_wide::<L>() {
                for t in 0..T {
                    let products = _mm256_madd_epi16(words[t], _mm256_set1_epi16(1));
                    dots[t] = _mm256_add_epi32(dots[t], products);
                }
            }
        }
        // SAFETY: they are one register long.
        let (scales, biases) = unsafe {
            (_mm256_loadu_ps(weights.scales[g].as_ptr()), _mm256_loadu_ps(weights.biases[g].as_ptr()))
        };
        for t in 0..T {
            let sum = x[t].sum_of(g * group, group);
            let x_scale = _mm256_set1_ps(x[t].scales[g * group / 32]);
            let products = _mm256_add_epi32(dots[t], _mm256_set1_epi32(offset::<L>() * sum));
            acc[t] = _mm256_fmadd_ps(_mm256_mul_ps(scales, x_scale), _mm256_cvtepi32_ps(products), acc[t]);
            if L::BIASES {
                acc[t] = _mm256_fmadd_ps(_mm256_mul_ps(biases, x_scale), _mm256_set1_ps(sum as f32), acc[t]);
            }
        }
    }
    for t in 0..T {
        at.store(out, t, acc[t]);
    }
    T
}
