//! Compares the GPU's kernels with the CPU's: every type of weights, unpacked and multiplied.

use forebay_engine::TokenId;
use forebay_engine::internals::backend::{
    Backend, Buf, BufShape, CpuBackend, GroupScore, Groups, HostMatrix, Matrix, Precision, Router,
    RouterWeights, Routing, Scores, Vector, Weight, rank,
};
use forebay_engine::internals::experts::{Device, ExecutorBuilder};
use forebay_kernels::{Affine, DType, Encoding, Tiles};
use forebay_testing::{assert_same_bits, relative_error};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::device::{TestDevice, open};

const ROWS: usize = 150;
const COLS: usize = 768;
const MOST_TOKENS: usize = 100;

/// The encodings that the GPU supports, in families. Each family's tests compile its kernels in parallel with the
/// others'.
mod families {
    use forebay_kernels::DType::*;
    use forebay_kernels::{Affine, DType, Encoding, Tiles};

    pub const FLOATS: [DType; 3] = [F32, F16, BF16];
    pub const PLAIN: [DType; 7] = [Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, MXFP4, NVFP4];
    pub const K: [DType; 5] = [Q2_K, Q3_K, Q4_K, Q5_K, Q6_K];
    pub const IQ: [DType; 9] = [IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_XS, IQ4_NL];

    pub fn blocks(types: &[DType]) -> Vec<Encoding> {
        types.iter().copied().map(Encoding::Blocks).collect()
    }

    pub fn planes() -> Vec<Encoding> {
        let affine = |bits, group, scales| Encoding::Affine(Affine { bits, group, scales });
        let tiles = |rows, cols, scales| Encoding::Tiles(Tiles { rows, cols, scales });
        vec![
            Encoding::Mxfp4,
            Encoding::Columns(BF16),
            affine(2, 32, BF16),
            affine(3, 64, F16),
            affine(4, 32, F16),
            affine(4, 64, BF16),
            affine(5, 32, F32),
            affine(6, 128, BF16),
            affine(8, 128, F32),
            tiles(128, 128, F32),
            tiles(24, 40, BF16),
        ]
    }
}

use families::{FLOATS, IQ, K, PLAIN, blocks, planes};

/// Every type that the GPU claims to support has a test here.
pub fn every_type_that_is_computed_is_tested<D: TestDevice>() {
    let device = open::<D>(None);
    let tested = [&FLOATS[..], &PLAIN, &K, &IQ].concat();
    for dtype in DType::computable() {
        assert_eq!(device.computes(dtype.into()), tested.contains(&dtype), "{dtype}");
    }
    assert!(blocks(&tested).into_iter().chain(planes()).all(|encoding| device.computes(encoding)));
}

/// Random weights of magnitude about one.
pub fn matrix(encoding: Encoding, rows: usize, cols: usize, seed: u64) -> HostMatrix {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let lengths = encoding.plane_bytes(rows, cols).unwrap();
    let mut planes = lengths.map(|len| {
        let mut bytes = vec![0; len];
        rng.fill_bytes(&mut bytes);
        bytes
    });
    let mut float = |dtype: DType, scale: f32| {
        let x = scale * ((rng.next_u32() % 2001) as f32 - 1000.0) / 1000.0;
        match dtype {
            DType::F32 => x.to_le_bytes().to_vec(),
            DType::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
            _ => half::bf16::from_f32(x).to_le_bytes().to_vec(),
        }
    };
    // Random bits would give floats of any magnitude.
    let [codes, scales, biases] = &mut planes;
    match encoding {
        Encoding::Blocks(dtype) | Encoding::Columns(dtype) if dtype.is_float() => {
            for bytes in codes.chunks_exact_mut(dtype.block_bytes()) {
                bytes.copy_from_slice(&float(dtype, 1.0));
            }
        }
        Encoding::Blocks(dtype) => {
            let (places, scale): (&[usize], f32) = match dtype {
                DType::Q8_0 => (&[0], 0.01),
                DType::Q4_0 | DType::Q5_0 => (&[0], 0.1),
                DType::Q4_1 | DType::Q5_1 => (&[0, 2], 0.1),
                DType::Q2_K => (&[80, 82], 0.03),
                DType::Q3_K => (&[108], 0.01),
                DType::IQ4_NL => (&[0], 0.02),
                DType::IQ1_S => (&[0], 0.1),
                DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => (&[0], 0.01),
                DType::IQ3_XXS => (&[0], 0.005),
                DType::IQ3_S => (&[0], 0.005),
                DType::Q4_K | DType::Q5_K => (&[0, 2], 0.003),
                DType::Q6_K => (&[208], 0.001),
                DType::IQ4_XS => (&[0], 0.001),
                _ => (&[], 0.0),
            };
            for block in codes.chunks_exact_mut(dtype.block_bytes()) {
                for &at in places {
                    block[at..at + 2].copy_from_slice(&float(DType::F16, scale));
                }
                match dtype {
                    DType::MXFP4 => block[0] = 124 + block[0] % 4,
                    // NaN counts as zero, small scales have no leading bit, and signs are ignored.
                    DType::NVFP4 if block[4] < 8 => block[..4].copy_from_slice(&[0x7f, 0x07, 0xb0, 0]),
                    // From an eighth to two.
                    DType::NVFP4 => block[..4].iter_mut().for_each(|scale| *scale = 32 + *scale % 32),
                    // Its float is in four pieces; the last one has the sign and most of the exponent.
                    DType::IQ1_M => block[55] = block[55] & 15 | 0x20,
                    _ => {}
                }
            }
        }
        Encoding::Affine(Affine { scales: dtype, .. }) => {
            for plane in [scales, biases] {
                for bytes in plane.chunks_exact_mut(dtype.block_bytes()) {
                    bytes.copy_from_slice(&float(dtype, 0.1));
                }
            }
        }
        Encoding::Tiles(Tiles { scales: dtype, .. }) => {
            // Replaces the code for NaN of either sign.
            codes.iter_mut().filter(|code| **code & 127 == 127).for_each(|code| *code ^= 1);
            for bytes in scales.chunks_exact_mut(dtype.block_bytes()) {
                bytes.copy_from_slice(&float(dtype, 0.01));
            }
        }
        Encoding::Mxfp4 => scales.iter_mut().for_each(|scale| *scale = 124 + *scale % 4),
        _ => unreachable!(),
    }
    HostMatrix { encoding, rows, cols, planes: planes.map(|bytes| bytes[..].into()), scale: 1.0 }
}

fn dequantised(matrix: &HostMatrix) -> Vec<f32> {
    let mut weights = vec![0.0; matrix.rows * matrix.cols];
    for (row, out) in weights.chunks_exact_mut(matrix.cols).enumerate() {
        matrix.view().dequantise_row(row, out);
    }
    weights
}

/// A backend with this matrix, one buffer as wide as its columns and one as its rows.
fn loaded<D: TestDevice>(
    precision: Precision,
    tokens: usize,
    matrix: HostMatrix,
) -> (Box<dyn ExecutorBuilder>, [Buf; 2]) {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let buffers = [BufShape { rows: tokens, width: cols }, BufShape { rows: tokens, width: rows }];
    let mut builder = open::<D>(None).executor(precision, &buffers).unwrap();
    builder.backend().load(Weight::Matrix(matrix)).unwrap();
    (builder, [Buf::nth(0, cols), Buf::nth(1, rows)])
}

fn assert_unpacked_to_the_processors_bits<D: TestDevice>(encodings: Vec<Encoding>) {
    for (i, encoding) in encodings.into_iter().enumerate() {
        let truth = dequantised(&matrix(encoding, ROWS, COLS, i as u64));
        let (mut builder, [out, _]) =
            loaded::<D>(Precision::Exact, ROWS, matrix(encoding, ROWS, COLS, i as u64));
        let backend = builder.backend();
        // In reverse order, so that rows must be looked up.
        let tokens: Vec<TokenId> = (0..ROWS as u32).rev().map(TokenId).collect();
        backend.begin(ROWS);
        backend.embed(Matrix::nth(0), &tokens, out).unwrap();
        let mut ours = vec![f32::NAN; ROWS * COLS];
        backend.read(out, &mut ours).unwrap();
        for (row, ours) in ours.chunks_exact(COLS).rev().enumerate() {
            let truth = &truth[row * COLS..][..COLS];
            assert_same_bits(ours, truth, &format!("{encoding}, row {row}"));
        }
    }
}

/// One row of activations uses another kernel than many rows. Some models have columns that are not whole groups.
fn assert_products_are_those_of_the_weights<D: TestDevice>(encodings: Vec<Encoding>) {
    for (i, encoding) in encodings.into_iter().enumerate() {
        let shapes = match encoding {
            Encoding::Blocks(dtype) if dtype.is_float() => vec![(ROWS, COLS), (70, 44), (33, 12)],
            Encoding::Tiles(_) => vec![(ROWS, COLS), (70, 44), (33, 50), (9, 8)],
            // More columns than a block's warps compute at a time, and more rows than all blocks do.
            Encoding::Blocks(DType::Q4_K | DType::Q6_K) => vec![(ROWS, COLS), (40, 4352), (2300, 256)],
            _ => vec![(ROWS, COLS)],
        };
        for (rows, cols) in shapes {
            for (precision, tolerance) in [(Precision::Exact, 1e-5), (Precision::Fast, 2e-3)] {
                let seed = i as u64;
                let truth = dequantised(&matrix(encoding, rows, cols, seed));
                // The activations are rows of a table.
                let x = matrix(Encoding::Blocks(DType::F32), MOST_TOKENS, cols, 1000 + seed);
                let activations = dequantised(&x);
                let (mut builder, [input, out]) =
                    loaded::<D>(precision, MOST_TOKENS, matrix(encoding, rows, cols, seed));
                let backend = builder.backend();
                backend.load(Weight::Matrix(x)).unwrap();
                for tokens in [1, 5, 20, MOST_TOKENS] {
                    let ids: Vec<TokenId> = (0..tokens as u32).map(TokenId).collect();
                    backend.begin(tokens);
                    backend.embed(Matrix::nth(1), &ids, input).unwrap();
                    backend.matmul(input, &[(Matrix::nth(0), out)]).unwrap();
                    let mut ours = vec![f32::NAN; tokens * rows];
                    backend.read(out, &mut ours).unwrap();
                    let product = |t: usize, r: usize| -> f32 {
                        let pairs = activations[t * cols..][..cols].iter().zip(&truth[r * cols..][..cols]);
                        pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32
                    };
                    let places = (0..tokens).flat_map(|t| (0..rows).map(move |r| (t, r)));
                    let exact: Vec<f32> = places.map(|(t, r)| product(t, r)).collect();
                    let error = relative_error(&ours, &exact);
                    let what = format!("{encoding} [{rows}, {cols}], {tokens} rows, {precision:?}");
                    assert!(error < tolerance, "{what}: {error}");
                }
            }
        }
    }
}

pub fn floats_are_unpacked_and_multiplied<D: TestDevice>() {
    assert_unpacked_to_the_processors_bits::<D>(blocks(&FLOATS));
    assert_products_are_those_of_the_weights::<D>(blocks(&FLOATS));
}

pub fn plain_types_are_unpacked_and_multiplied<D: TestDevice>() {
    assert_unpacked_to_the_processors_bits::<D>(blocks(&PLAIN));
    assert_products_are_those_of_the_weights::<D>(blocks(&PLAIN));
}

pub fn k_types_are_unpacked_and_multiplied<D: TestDevice>() {
    assert_unpacked_to_the_processors_bits::<D>(blocks(&K));
    assert_products_are_those_of_the_weights::<D>(blocks(&K));
}

pub fn iq_types_are_unpacked_and_multiplied<D: TestDevice>() {
    assert_unpacked_to_the_processors_bits::<D>(blocks(&IQ));
    assert_products_are_those_of_the_weights::<D>(blocks(&IQ));
}

pub fn types_in_planes_are_unpacked_and_multiplied<D: TestDevice>() {
    assert_unpacked_to_the_processors_bits::<D>(planes());
    assert_products_are_those_of_the_weights::<D>(planes());
}

/// Activations too large for f16. The kernel scales such rows down, whatever the other rows are.
fn some_large(mut table: HostMatrix) -> HostMatrix {
    let row = table.cols * 4;
    let mut bytes = table.planes[0].to_vec();
    for row in bytes.chunks_exact_mut(row).step_by(3) {
        for x in row.chunks_exact_mut(4) {
            let large = 3e6 * f32::from_le_bytes([x[0], x[1], x[2], x[3]]);
            x.copy_from_slice(&large.to_le_bytes());
        }
    }
    table.planes[0] = bytes[..].into();
    table
}

/// The products of one row of activations with a matrix's rows.
fn products(activations: &[f32], weights: &[f32]) -> Vec<f32> {
    let product = |row: &[f32]| -> f32 {
        activations.iter().zip(row).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32
    };
    weights.chunks_exact(activations.len()).map(product).collect()
}

/// Multiplies rows of activations, some of them large, with a matrix, and compares.
fn assert_products<D: TestDevice>(dtype: DType, [rows, cols]: [usize; 2], tokens: usize) {
    let weights = || matrix(Encoding::Blocks(dtype), rows, cols, 1);
    let truth = dequantised(&weights());
    let table = some_large(matrix(Encoding::Blocks(DType::F32), tokens, cols, 2));
    let activations = dequantised(&table);
    let (mut builder, [x, out]) = loaded::<D>(Precision::Fast, tokens, weights());
    let backend = builder.backend();
    backend.load(Weight::Matrix(table)).unwrap();
    let ids: Vec<TokenId> = (0..tokens as u32).map(TokenId).collect();
    backend.begin(tokens);
    backend.embed(Matrix::nth(1), &ids, x).unwrap();
    backend.matmul(x, &[(Matrix::nth(0), out)]).unwrap();
    let mut ours = vec![f32::NAN; tokens * rows];
    backend.read(out, &mut ours).unwrap();
    for (t, ours) in ours.chunks_exact(rows).enumerate() {
        let error = relative_error(ours, &products(&activations[t * cols..][..cols], &truth));
        assert!(error < 2e-3, "{dtype}, row {t} of {tokens}: {error}");
    }
}

pub fn large_activations_are_multiplied_too<D: TestDevice>() {
    for (tokens, dtype) in
        [(1, DType::Q4_K), (7, DType::Q4_K), (20, DType::Q6_K), (70, DType::Q4_K), (5, DType::F16)]
    {
        assert_products::<D>(dtype, [ROWS, COLS], tokens);
    }
}

/// Enough rows for every warp of a GPU, as in an output matrix, with several conversations' tokens.
pub fn products_of_a_tall_matrix_are_those_of_its_weights<D: TestDevice>() {
    for (dtype, tokens) in [(DType::Q6_K, 12), (DType::Q4_K, 3)] {
        assert_products::<D>(dtype, [34_000, 256], tokens);
    }
}

/// Additions and norms are deferred and may run in the kernel of the next product. Their results must exist, too.
pub fn a_sum_is_normed_and_multiplied<D: TestDevice>() {
    let encodings =
        [Encoding::Blocks(DType::F32), Encoding::Blocks(DType::Q4_K), Encoding::Blocks(DType::Q6_K)];
    for (i, encoding) in encodings.into_iter().enumerate() {
        for precision in [Precision::Exact, Precision::Fast] {
            let weights = matrix(encoding, ROWS, COLS, i as u64);
            let truth = dequantised(&weights);
            let table = matrix(Encoding::Blocks(DType::F32), 2, COLS, 77);
            let tokens = dequantised(&table);
            let norm: Vec<f32> = (0..COLS).map(|i| 0.5 + i as f32 / COLS as f32).collect();
            let gpu = open::<D>(None);
            let wide = BufShape { rows: 4, width: COLS };
            let shapes = [wide, wide, wide, BufShape { rows: 4, width: ROWS }];
            let mut builder = gpu.executor(precision, &shapes).unwrap();
            let backend = builder.backend();
            backend.load(Weight::Matrix(weights)).unwrap();
            backend.load(Weight::Matrix(table)).unwrap();
            backend.load(Weight::Vector(norm.clone())).unwrap();
            let [x, y, normed] = [0, 1, 2].map(|i| Buf::nth(i, COLS));
            let out = Buf::nth(3, ROWS);
            backend.begin(1);
            backend.embed(Matrix::nth(1), &[TokenId(0)], x).unwrap();
            backend.embed(Matrix::nth(1), &[TokenId(1)], y).unwrap();
            // Twice, because a sum may be moved and moved back.
            let mut sum = tokens[..COLS].to_vec();
            for time in 1..=2 {
                backend.add(x, y).unwrap();
                backend.rms_norm(x, Vector::nth(0), 1e-6, normed).unwrap();
                backend.matmul(normed, &[(Matrix::nth(0), out)]).unwrap();
                sum.iter_mut().zip(&tokens[COLS..]).for_each(|(sum, y)| *sum += y);
                let squares: f32 = sum.iter().map(|v| v * v).sum();
                let scale = 1.0 / (squares / COLS as f32 + 1e-6).sqrt();
                let expected: Vec<f32> = sum.iter().zip(&norm).map(|(v, w)| v * scale * w).collect();
                let product = |r: usize| -> f32 {
                    let row = &truth[r * COLS..][..COLS];
                    row.iter().zip(&expected).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32
                };
                let products: Vec<f32> = (0..ROWS).map(product).collect();
                for (what, buf, truth) in
                    [("product", out, &products), ("sum", x, &sum), ("normed", normed, &expected)]
                {
                    let mut ours = vec![f32::NAN; truth.len()];
                    backend.read(buf, &mut ours).unwrap();
                    let error = relative_error(&ours, truth);
                    assert!(error < 1e-5, "{encoding}, {precision:?}, time {time}, {what}: {error}");
                }
            }
        }
    }
}

/// A router's choice after a sum and a norm, which one kernel may do: experts, weights, the sum and the normed row.
fn routed(
    backend: &mut dyn Backend,
    weights: &HostMatrix,
    router: &Router,
    tokens: usize,
) -> (Vec<u32>, Vec<f32>, Vec<f32>, Vec<f32>) {
    let (experts, cols) = (weights.rows, weights.cols);
    let copy = |w: &HostMatrix| HostMatrix { planes: w.planes.clone(), ..*w };
    backend.load(Weight::Matrix(copy(weights))).unwrap();
    let table = matrix(Encoding::Blocks(DType::F32), tokens + 1, cols, 8);
    backend.load(Weight::Matrix(table)).unwrap();
    backend.load(Weight::Vector((0..cols).map(|i| 0.5 + i as f32 / cols as f32).collect())).unwrap();
    backend.load(Weight::Vector((0..experts).map(|i| (i * 7 % 5) as f32 * 0.1).collect())).unwrap();
    backend.load(Weight::Vector((0..experts).map(|i| 0.5 + (i * 3 % 7) as f32).collect())).unwrap();
    let [x, y, normed] = [0, 1, 2].map(|i| Buf::nth(i, cols));
    let logits = Buf::nth(3, experts);
    let ids = |from: u32| (from..from + tokens as u32).map(TokenId).collect::<Vec<_>>();
    backend.begin(tokens);
    backend.embed(Matrix::nth(1), &ids(0), x).unwrap();
    backend.embed(Matrix::nth(1), &ids(1), y).unwrap();
    backend.add(x, y).unwrap();
    backend.rms_norm(x, Vector::nth(0), 1e-6, normed).unwrap();
    backend.matmul(normed, &[(Matrix::nth(0), logits)]).unwrap();
    let correction = (router.scores == Scores::Sigmoid).then(|| Vector::nth(1));
    let factors = (router.epsilon > 0.0).then(|| Vector::nth(2));
    let weights = RouterWeights { matrix: Matrix::nth(0), bias: None, correction, factors };
    let mut routing = Routing::default();
    backend.route(logits, router, &weights, &mut routing).unwrap();
    let mut read = |buf| {
        let mut numbers = vec![f32::NAN; tokens * cols];
        backend.read(buf, &mut numbers).unwrap();
        numbers
    };
    let (sum, normed) = (read(x), read(normed));
    let weights =
        (0..tokens).flat_map(|token| routing.ranks(token).map(|(_, weight)| weight).collect::<Vec<_>>());
    (routing.experts().to_vec(), weights.collect(), sum, normed)
}

pub fn routers_choose_what_the_processor_chooses<D: TestDevice>() {
    let softmax = |experts, top_k| Router {
        experts,
        top_k,
        scores: Scores::Softmax,
        groups: None,
        normalise: true,
        epsilon: 0.0,
        scale: 1.0,
    };
    let sigmoid = |experts, top_k, groups| Router {
        scores: Scores::Sigmoid,
        groups,
        scale: 2.5,
        ..softmax(experts, top_k)
    };
    let groups = |count, used, score| Some(Groups { count, used, score });
    let cases = [
        (softmax(128, 8), DType::F32, 2048, &[1, 5, 33][..]),
        (softmax(22, 3), DType::BF16, 544, &[1, 4, 9]),
        (softmax(40, 40), DType::F16, 32, &[2, 64]),
        (sigmoid(72, 6, groups(9, 4, GroupScore::BestTwo)), DType::F32, 96, &[1, 7, 70]),
        (sigmoid(36, 5, groups(3, 1, GroupScore::Best)), DType::F32, 4384, &[1, 6]),
        // Logits are far apart, so the tolerance is large.
        (
            Router { scores: Scores::SparseMixer { tolerance: 1.5 }, ..softmax(40, 2) },
            DType::F32,
            64,
            &[1, 6, 70],
        ),
        (
            Router { scores: Scores::SparseMixer { tolerance: 0.4 }, normalise: false, ..softmax(16, 3) },
            DType::F32,
            64,
            &[1, 6, 70],
        ),
        // With factors of experts; alone, and for the only expert.
        (Router { epsilon: 0.25, ..sigmoid(24, 4, None) }, DType::F32, 64, &[1, 6, 70]),
        (softmax(16, 1), DType::F32, 64, &[1, 6, 70]),
    ];
    for (router, dtype, cols, counts) in cases {
        let weights = matrix(Encoding::Blocks(dtype), router.experts, cols, 9);
        for &tokens in counts {
            let wide = BufShape { rows: tokens, width: cols };
            let shapes = [wide, wide, wide, BufShape { rows: tokens, width: router.experts }];
            let gpu = open::<D>(None);
            let mut ours = gpu.executor(Precision::Fast, &shapes).unwrap();
            let (experts, weights_of, sum, normed) = routed(ours.backend(), &weights, &router, tokens);
            let mut truth = CpuBackend::new(1, Precision::Exact, &shapes).unwrap();
            let truth = routed(&mut truth, &weights, &router, tokens);
            let what = format!("{tokens} rows of {cols}, {router:?}");
            assert_eq!(experts, truth.0, "{what}");
            assert!(router.top_k > 1 || weights_of.iter().all(|&weight| weight == 1.0), "{weights_of:?}");
            for (name, ours, truth) in
                [("weights", &weights_of, &truth.1), ("sum", &sum, &truth.2), ("normed", &normed, &truth.3)]
            {
                let error = relative_error(ours, truth);
                assert!(error < 1e-5, "{what}: {name}: {error}");
            }
        }
    }
}

/// Logits of many kinds, among them many equal ones, and more of those than the kernel can rank.
pub fn the_likeliest_tokens_are_those_that_the_processor_finds<D: TestDevice>() {
    const VOCAB: usize = 20_000;
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let mut any = |scale: f32, offset: f32| -> Vec<f32> {
        (0..VOCAB).map(|_| offset + scale * ((rng.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0)).collect()
    };
    let mut odd = any(3.0, 0.0);
    let values =
        [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, f32::MAX, f32::MIN, 1e-40];
    odd.iter_mut().step_by(37).zip(values.iter().cycle()).for_each(|(logit, value)| *logit = *value);
    let mut few = vec![f32::NEG_INFINITY; VOCAB];
    few[7] = -2.0;
    few[19_999] = -1.0;
    let rows = [
        any(10.0, 0.0),
        any(1.0, -30.0),
        any(1e-3, 1.0),
        any(4.0, 0.0).into_iter().map(f32::round).collect(),
        odd,
        few,
        vec![1.5; VOCAB],
        vec![f32::NAN; VOCAB],
    ];
    let table: Vec<u8> = rows.iter().flatten().flat_map(|logit: &f32| logit.to_le_bytes()).collect();
    let planes = [&table[..], &[], &[]].map(Into::into);
    let encoding = Encoding::Blocks(DType::F32);
    let matrix = HostMatrix { encoding, rows: rows.len(), cols: VOCAB, planes, scale: 1.0 };
    let (mut builder, [logits, _]) = loaded::<D>(Precision::Fast, rows.len(), matrix);
    let backend = builder.backend();
    let tokens: Vec<TokenId> = (0..rows.len() as u32).map(TokenId).collect();
    let mut best = Vec::new();
    for k in [1, 40, 256] {
        backend.begin(rows.len());
        backend.embed(Matrix::nth(0), &tokens, logits).unwrap();
        backend.best(logits, k, &mut best).unwrap();
        assert_eq!(best.len(), rows.len() * k);
        for (i, (ours, row)) in best.chunks_exact(k).zip(&rows).enumerate() {
            let mut truth = Vec::new();
            rank(row, k, &mut truth);
            assert_eq!(ours[..truth.len()], truth, "row {i}, the best {k}");
            assert!(ours[truth.len()..].iter().all(|ranked| ranked.logit == f32::NEG_INFINITY));
            let mut read = vec![0.0; VOCAB];
            backend.read_row(logits, i, &mut read).unwrap();
            // Some of them are NaN on purpose.
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            assert!(row.len() == VOCAB && read.iter().zip(row).all(same));
        }
    }
}
