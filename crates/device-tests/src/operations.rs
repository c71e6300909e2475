//! Compares the GPU's operations with the CPU's: each alone, in unusual orders, and attention of every shape.

use forebay_engine::internals::backend::{
    Activation, Attention, Backend, Batch, Buf, BufShape, Convolution, CpuBackend, DeltaRule, DeltaShape,
    Gate, HeadMatrices, HeadOrder, Heads, KvShape, Matrix, Precision, Rope, RopePairs, Sequence,
    SequenceState, StateShape, Vector, Weight, Window,
};
use forebay_engine::internals::experts::Device;
use forebay_engine::{LayerIdx, TokenId};
use forebay_kernels::{DType, Encoding};
use forebay_testing::relative_error;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::device::{TestDevice, open};
use crate::kernels::matrix;

/// Numbers between -2 and 2.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| rng.next_u32() as f32 / (1u32 << 30) as f32 - 2.0).collect()
}

fn read(backend: &mut dyn Backend, rows: usize, buf: Buf) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * buf.width()];
    backend.read(buf, &mut out).unwrap();
    out
}

/// Runs operations on the GPU and, in full precision, on the CPU, and compares what they return.
fn compare<D: TestDevice>(
    what: &str,
    precision: Precision,
    shapes: &[BufShape],
    tolerance: f64,
    run: impl Fn(&mut dyn Backend) -> Vec<Vec<f32>>,
) {
    let gpu = open::<D>(None);
    let ours = run(gpu.executor(precision, shapes).unwrap().backend());
    let truth = run(&mut CpuBackend::new(1, Precision::Exact, shapes).unwrap());
    for (i, (ours, truth)) in ours.iter().zip(&truth).enumerate() {
        let error = relative_error(ours, truth);
        assert!(error < tolerance, "{what}, {precision:?}, result {i}: {error}");
    }
}

pub fn operations_on_rows_are_the_processors<D: TestDevice>() {
    const WIDTH: usize = 100;
    const ROWS: usize = 3;
    let shapes = [WIDTH, WIDTH, 20, 1].map(|width| BufShape { rows: ROWS, width });
    let [x, y, some, one] = std::array::from_fn(|i| Buf::nth(i, shapes[i].width));
    compare::<D>("rows", Precision::Fast, &shapes, 2e-6, |b| {
        for (i, count) in [WIDTH, 1].into_iter().enumerate() {
            b.load(Weight::Vector(numbers(count, i as u64))).unwrap();
        }
        b.begin(ROWS);
        let mut results = Vec::new();
        let mut each = |operation: &dyn Fn(&mut dyn Backend)| {
            for (i, buf) in [x, y, some, one].into_iter().enumerate() {
                b.write(buf, &numbers(ROWS * buf.width(), 10 + i as u64)).unwrap();
            }
            operation(b);
            results.extend([read(b, ROWS, x), read(b, ROWS, y)]);
        };
        for activation in [
            Activation::SwiGlu,
            Activation::Clamped { alpha: 1.702, limit: 0.5 },
            Activation::ClippedBefore(0.5),
            Activation::ClippedAfter(0.3),
            Activation::GeGlu,
            Activation::ReGlu,
        ] {
            each(&|b| b.activate(x, Some(y), activation).unwrap());
        }
        each(&|b| b.activate(x, None, Activation::ReluSquared).unwrap());
        for function in [Gate::Sigmoid, Gate::Softplus, Gate::Factor] {
            for gate in [y, some, one] {
                each(&|b| b.gate(x, gate, function).unwrap());
            }
            // The same memory as shorter rows.
            each(&|b| b.gate(x.narrow(40), some.narrow(8), function).unwrap());
        }
        for weights in [0, 1] {
            each(&|b| b.scale(x, Vector::nth(weights)).unwrap());
        }
        each(&|b| b.softcap(x, 0.7).unwrap());
        each(&|b| b.layer_norm(x, Vector::nth(0), 1e-3, y).unwrap());
        each(&|b| b.layer_norm(x, Vector::nth(0), 1e-3, x).unwrap());
        each(&|b| b.weigh_by_best(x, some, y).unwrap());
        each(&|b| b.weigh_by_best(x.narrow(60), some.narrow(7), y.narrow(60)).unwrap());
        results
    });
}

/// Products of heads with matrices that are a part of each head's rows, as they are stored or transposed. What a head has
/// beyond its matrix's columns is copied.
pub fn products_of_heads_are_the_processors<D: TestDevice>() {
    const HEADS: usize = 3;
    // Stored rows of a head, and those of its matrix.
    const STORED: usize = 40;
    const FIRST: usize = 7;
    const USED: usize = 21;
    for (dtype, cols) in [(DType::F32, 44), (DType::Q8_0, 96), (DType::Q4_K, 256), (DType::Q4_K, 1280)] {
        for transposed in [false, true] {
            let (part, product) = if transposed { (USED, cols) } else { (cols, USED) };
            for rest in [0, 5] {
                let widths = [HEADS * (part + rest), HEADS * (product + rest)];
                let shapes = widths.map(|width| BufShape { rows: 2, width });
                let [x, out] = [0, 1].map(|i| Buf::nth(i, widths[i]));
                let what = format!("{dtype}, {cols} columns, {rest} more, transposed: {transposed}");
                compare::<D>(&what, Precision::Exact, &shapes, 1e-5, |b| {
                    let stored = matrix(Encoding::Blocks(dtype), HEADS * STORED, cols, 1);
                    b.load(Weight::Matrix(stored)).unwrap();
                    let w = HeadMatrices {
                        stored: Matrix::nth(0),
                        heads: HEADS,
                        first: FIRST,
                        rows: USED,
                        transposed,
                    };
                    b.begin(2);
                    b.write(x, &numbers(2 * widths[0], 2)).unwrap();
                    b.head_products(x, &w, out).unwrap();
                    vec![read(b, 2, out)]
                });
            }
        }
    }
}

/// Rows of every size can be written while operations that were called before still use the buffer.
pub fn what_is_written_is_used_from_then_on<D: TestDevice>() {
    for width in [1, 40, 9000] {
        let shapes = [BufShape { rows: 2, width }; 2];
        let [x, y] = [0, 1].map(|i| Buf::nth(i, width));
        compare::<D>("write", Precision::Fast, &shapes, 1e-6, |b| {
            b.load(Weight::Vector(vec![1.0; width])).unwrap();
            b.begin(2);
            b.write(x, &numbers(2 * width, 1)).unwrap();
            b.write(y, &numbers(2 * width, 2)).unwrap();
            b.add(x, y).unwrap();
            b.write(y, &numbers(2 * width, 3)).unwrap();
            b.add(x, y).unwrap();
            b.rms_norm(x, Vector::nth(0), 1e-6, y).unwrap();
            b.write(x, &numbers(2 * width, 4)).unwrap();
            vec![read(b, 2, x), read(b, 2, y)]
        });
    }
}

/// Additions, norms and products in orders that one kernel cannot compute, or not with what it may move.
pub fn every_order_of_sums_norms_and_products_is_computed<D: TestDevice>() {
    const WIDTH: usize = 256;
    let shapes = [WIDTH; 5].map(|width| BufShape { rows: 3, width });
    let [x, y, normed, z, out] = std::array::from_fn(|i| Buf::nth(i, WIDTH));
    for (encoding, precision, tolerance) in [
        (DType::F32, Precision::Fast, 2e-5),
        (DType::Q8_0, Precision::Exact, 2e-5),
        (DType::Q8_0, Precision::Fast, 5e-3),
    ] {
        compare::<D>("orders", precision, &shapes, tolerance, |b| {
            let encoding = Encoding::Blocks(encoding);
            b.load(Weight::Matrix(matrix(Encoding::Blocks(DType::F32), 6, WIDTH, 1))).unwrap();
            b.load(Weight::Matrix(matrix(encoding, WIDTH, WIDTH, 2))).unwrap();
            b.load(Weight::Vector(numbers(WIDTH, 3))).unwrap();
            b.load(Weight::Vector(vec![0.3])).unwrap();
            b.load(Weight::Vector(numbers(WIDTH / 4, 4))).unwrap();
            let (w, norm, scale, part) = (Matrix::nth(1), Vector::nth(0), Vector::nth(1), Vector::nth(2));
            let mut results = Vec::new();
            // Then several rows use the buffers of one.
            for rows in [1, 3, 1] {
                let tokens = |from: u32| (from..from + rows as u32).map(TokenId).collect::<Vec<_>>();
                b.begin(rows);
                b.embed(Matrix::nth(0), &tokens(0), x).unwrap();
                b.embed(Matrix::nth(0), &tokens(3), y).unwrap();
                b.matmul(x, &[(w, z)]).unwrap();
                b.rms_norm(z, norm, 1e-6, z).unwrap();
                // A sum that the batch did not start from.
                b.add(z, y).unwrap();
                b.rms_norm(z, norm, 1e-6, normed).unwrap();
                b.matmul(normed, &[(w, out)]).unwrap();
                // A norm of the output, and a factor, before it is added.
                b.rms_norm(out, norm, 1e-6, out).unwrap();
                b.scale(out, scale).unwrap();
                b.add(x, out).unwrap();
                b.rms_norm(x, norm, 1e-6, normed).unwrap();
                // The product overwrites what is added.
                b.matmul(normed, &[(w, out)]).unwrap();
                b.rms_norm(out, part, 1e-6, out).unwrap();
                b.add(x, out).unwrap();
                b.scale(x, scale).unwrap();
                // Two blocks read the same norm.
                b.add(x, y).unwrap();
                b.rms_norm(x, norm, 1e-6, normed).unwrap();
                b.matmul(normed, &[(w, out)]).unwrap();
                b.add(x, out).unwrap();
                b.matmul(normed, &[(w, out)]).unwrap();
                b.add(x, out).unwrap();
                b.rms_norm(x, norm, 1e-6, x).unwrap();
                results.extend([x, y, z, normed, out].map(|buf| read(b, rows, buf)));
                // What was called before a row is written sees the old row, wherever a sum has moved it.
                for _ in 0..2 {
                    b.add(x, y).unwrap();
                    b.rms_norm(x, norm, 1e-6, normed).unwrap();
                    b.matmul(normed, &[(w, out)]).unwrap();
                    b.rms_norm(x, norm, 1e-6, z).unwrap();
                    b.write(x, &numbers(rows * WIDTH, 5)).unwrap();
                    results.extend([x, z].map(|buf| read(b, rows, buf)));
                }
            }
            results
        });
    }
}

/// What happens to queries, keys and values before attention.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Before {
    Nothing,
    Rotation,
    NormAndRotation,
    RotationAndNorm,
    RotationAndValueNorm,
    RotationAndTemperature,
}

struct Case {
    heads: usize,
    kv: KvShape,
    sinks: bool,
    before: Before,
}

/// The tokens of two conversations in each batch: their prompts together, two more of one, then one of each, twice.
const SHORT: &[&[usize]] = &[&[75, 21], &[2], &[1, 1], &[1, 1]];

/// Conversations that are so long that positions may be split.
const LONG: &[&[usize]] = &[&[290, 7], &[280, 1], &[1, 1], &[3, 1]];

/// Attention of two conversations.
fn attended(b: &mut dyn Backend, case: &Case, batches: &[&[usize]]) -> Vec<Vec<f32>> {
    let Case { heads, kv, sinks, before } = *case;
    let [q, k, v, out] = widths(case).map(|(i, width)| Buf::nth(i, width));
    let (angles, factors) = (Buf::nth(4, ROTATED), Buf::nth(5, 1));
    b.load(Weight::Vector(numbers(heads, 1))).unwrap();
    b.load(Weight::Vector(numbers(kv.key_dim, 2))).unwrap();
    b.load(Weight::Vector(numbers(kv.value_dim, 3))).unwrap();
    let [norm, value_norm] = [1, 2].map(Vector::nth);
    let rope = Rope { frequencies: numbers(ROTATED / 2, 4), divisors: None, scale: 1.1 };
    let pairs = match before {
        Before::RotationAndTemperature => RopePairs::Interleaved,
        _ => RopePairs::HalfSplit,
    };
    let heads_of = Heads { dim: kv.key_dim, eps: 1e-6, pairs, angles };
    let mut states = [0, 1].map(|_| SequenceState::new(0, &[Some(StateShape::Attention(kv))], b));
    let mut results = Vec::new();
    for (batch, &lens) in batches.iter().enumerate() {
        let rows: usize = lens.iter().sum();
        let mut positions = Vec::new();
        let mut first = 0;
        let mut sequences = Vec::new();
        for (state, len) in states.iter_mut().zip(lens) {
            positions.extend((state.len()..state.len() + len).map(|position| position as u32));
            sequences.push(Sequence { state, rows: first..first + len });
            first += len;
        }
        b.begin(rows);
        b.rope_angles(&rope, &positions, angles).unwrap();
        b.write(factors, &numbers(rows, 5)).unwrap();
        for buf in [q, k, v] {
            let seed = (10 * batch + buf.index()) as u64;
            b.write(buf, &numbers(rows * buf.width(), 100 + seed)).unwrap();
        }
        match before {
            Before::Nothing => {}
            Before::NormAndRotation => {
                b.norm_and_rotate([(q, Some(norm)), (k, Some(norm))], &heads_of).unwrap()
            }
            _ => b.norm_and_rotate([(q, None), (k, None)], &heads_of).unwrap(),
        }
        match before {
            Before::RotationAndNorm => {
                b.rms_norm(q, norm, 1e-6, q).unwrap();
                b.rms_norm(k, norm, 1e-6, k).unwrap();
            }
            Before::RotationAndValueNorm => b.rms_norm(v, value_norm, 1e-6, v).unwrap(),
            Before::RotationAndTemperature => b.gate(q, factors, Gate::Factor).unwrap(),
            _ => {}
        }
        let attention = Attention {
            layer: LayerIdx(0),
            q,
            k,
            v,
            out,
            scale: 0.7 / (kv.key_dim as f32).sqrt(),
            sinks: sinks.then(|| Vector::nth(0)),
        };
        let tokens = vec![TokenId(0); rows];
        let (tokens, positions) = (&tokens[..], &positions[..]);
        let mut batch = Batch { tokens, positions, stream: None, sequences: &mut sequences };
        b.attention(&attention, &mut batch).unwrap();
        results.push(read(b, rows, out));
        for (state, len) in states.iter_mut().zip(lens) {
            state.settle(state.len() + len);
        }
    }
    results
}

/// A convolution of two conversations: their prompts, the first of which is shorter than what the convolution spans,
/// then a few tokens of each.
pub fn convolutions_go_on_where_they_ended<D: TestDevice>() {
    const CHANNELS: usize = 150;
    let shapes = [CHANNELS; 2].map(|width| BufShape { rows: 20, width });
    let [x, out] = [0, 1].map(|i| Buf::nth(i, CHANNELS));
    for kernel in [2, 4] {
        compare::<D>("convolution", Precision::Fast, &shapes, 1e-6, |b| {
            b.load(Weight::Vector(numbers(kernel * CHANNELS, 1))).unwrap();
            let shape = StateShape::Recurrent((kernel - 1) * CHANNELS);
            let mut states = [0, 1].map(|_| SequenceState::new(0, &[Some(shape)], b));
            let mut results = Vec::new();
            for (batch, lens) in [[1usize, 9], [1, 1], [7, 2], [2, 1]].into_iter().enumerate() {
                let rows = lens[0] + lens[1];
                b.begin(rows);
                b.write(x, &numbers(rows * CHANNELS, 10 + batch as u64)).unwrap();
                let convolution = Convolution { layer: LayerIdx(0), x, out, filters: Vector::nth(0), kernel };
                in_batch(&mut states, lens, |batch| b.convolve(&convolution, batch).unwrap());
                results.push(read(b, rows, out));
            }
            results
        });
    }
}

const ROTATED: usize = 16;

fn widths(case: &Case) -> [(usize, usize); 4] {
    let KvShape { heads, key_dim, value_dim, .. } = case.kv;
    [case.heads * key_dim, heads * case.kv.own_key_dim(), heads * value_dim, case.heads * value_dim]
        .into_iter()
        .enumerate()
        .collect::<Vec<_>>()
        .try_into()
        .unwrap()
}

/// Heads of every size, the largest of which have no kernel of their own, and every kind of window.
pub fn attention_of_every_shape_is_the_processors<D: TestDevice>() {
    use Before::*;
    use Window::{Chunk, Last};
    let kv = |heads, key_dim, value_dim, window| KvShape { heads, key_dim, value_dim, window, latent: false };
    let case = |heads, kv, sinks, before| Case { heads, kv, sinks, before };
    let cases = [
        case(4, kv(2, 192, 128, Some(Last(17))), true, Rotation),
        case(4, kv(1, 512, 512, None), false, RotationAndValueNorm),
        case(2, kv(2, 256, 256, Some(Last(70))), false, RotationAndValueNorm),
        case(4, kv(2, 64, 64, Some(Chunk(32))), true, Nothing),
        case(6, kv(2, 128, 128, Some(Chunk(70))), false, RotationAndNorm),
        case(4, kv(4, 32, 32, Some(Chunk(77))), false, NormAndRotation),
        case(5, kv(1, 72, 40, Some(Chunk(10))), false, RotationAndTemperature),
        case(12, kv(1, 128, 128, Some(Last(33))), true, RotationAndTemperature),
    ];
    cases.iter().for_each(|case| compare_attention::<D>(case, SHORT));
}

/// Values that are the last channels of their keys.
pub fn attention_to_latents_is_the_processors<D: TestDevice>() {
    let latents = |heads, key_dim, value_dim| Case {
        heads,
        kv: KvShape { heads: 1, key_dim, value_dim, window: None, latent: true },
        sinks: false,
        before: Before::Nothing,
    };
    compare_attention::<D>(&latents(5, 576, 512), SHORT);
    compare_attention::<D>(&latents(20, 80, 64), SHORT);
    compare_attention::<D>(&latents(3, 48, 32), LONG);
}

pub fn attention_over_many_positions_is_the_processors<D: TestDevice>() {
    let case = |heads, window, sinks| Case {
        heads,
        kv: KvShape { heads: 2, key_dim: 32, value_dim: 32, window, latent: false },
        sinks,
        before: Before::NormAndRotation,
    };
    compare_attention::<D>(&case(4, None, true), LONG);
    compare_attention::<D>(&case(2, Some(Window::Last(300)), false), LONG);
    compare_attention::<D>(&case(6, Some(Window::Chunk(400)), true), LONG);
}

fn compare_attention<D: TestDevice>(case: &Case, batches: &[&[usize]]) {
    let rows = batches.iter().map(|lens| lens.iter().sum()).max().unwrap_or(0);
    let shape = |width| BufShape { rows, width };
    let widths = widths(case).map(|(_, width)| width).into_iter().chain([ROTATED, 1]);
    let shapes: Vec<BufShape> = widths.map(shape).collect();
    let what = format!("{} heads, {:?}, {:?}", case.heads, case.kv, case.before);
    for (precision, tolerance) in [(Precision::Fast, 2e-3), (Precision::Exact, 1e-5)] {
        compare::<D>(&what, precision, &shapes, tolerance, |b| attended(b, case, batches));
    }
}

/// The tokens of two conversations in each batch.
const STRETCHES: [[usize; 2]; 4] = [[1, 9], [1, 1], [70, 2], [2, 1]];

/// Heads of every size and order, and prompts that are long enough for chunks.
pub fn the_delta_rule_is_the_processors<D: TestDevice>() {
    use HeadOrder::{Grouped, Interleaved};
    for (key_heads, value_heads, [key_dim, value_dim], kernel, order) in
        [(2, 4, [128, 128], 4, Grouped), (2, 6, [40, 72], 3, Interleaved), (1, 1, [6, 20], 2, Grouped)]
    {
        let shape = DeltaShape { key_heads, value_heads, key_dim, value_dim, kernel, order };
        let widths = [shape.channels(), shape.channels(), value_heads, value_heads, value_heads * value_dim];
        let shapes = widths.map(|width| BufShape { rows: 72, width });
        for precision in [Precision::Fast, Precision::Exact] {
            compare::<D>(&format!("{shape:?}"), precision, &shapes, D::RECURRENCE, |b| {
                recurred(b, shape, &shapes)
            });
        }
    }
}

/// The delta rule for two conversations.
fn recurred(b: &mut dyn Backend, shape: DeltaShape, shapes: &[BufShape; 5]) -> Vec<Vec<f32>> {
    let [qkv, convolved, gate, strength, out] = std::array::from_fn(|i| Buf::nth(i, shapes[i].width));
    let heads = shape.value_heads;
    b.load(Weight::Vector(numbers(shape.kernel * shape.channels(), 1))).unwrap();
    b.load(Weight::Vector(numbers(heads, 2).iter().map(|rate| -0.1 - rate.abs()).collect())).unwrap();
    b.load(Weight::Vector(numbers(heads, 3))).unwrap();
    let [filters, rates, biases] = [0, 1, 2].map(Vector::nth);
    let kept = StateShape::Recurrent(shape.state_floats().unwrap());
    let mut states = [0, 1].map(|_| SequenceState::new(0, &[Some(kept)], b));
    let mut results = Vec::new();
    for (batch, lens) in STRETCHES.into_iter().enumerate() {
        let rows = lens[0] + lens[1];
        b.begin(rows);
        for buf in [qkv, gate, strength] {
            let seed = (10 * batch + buf.index()) as u64;
            b.write(buf, &numbers(rows * buf.width(), 100 + seed)).unwrap();
        }
        let layer = LayerIdx(0);
        let (a, b_gate) = (gate, strength);
        let rule = DeltaRule { layer, shape, qkv, convolved, a, b: b_gate, out, filters, rates, biases };
        in_batch(&mut states, lens, |batch| b.delta_rule(&rule, batch).unwrap());
        results.push(read(b, rows, out));
    }
    results
}

/// Computes so many tokens of two conversations.
fn in_batch(states: &mut [SequenceState; 2], lens: [usize; 2], compute: impl FnOnce(&mut Batch<'_>)) {
    let starts = states.each_ref().map(|state| state.len());
    let positions: Vec<u32> =
        starts.iter().zip(lens).flat_map(|(&start, len)| start..start + len).map(|at| at as u32).collect();
    let tokens = vec![TokenId(0); positions.len()];
    let [first, second] = states.each_mut();
    let mut sequences = [
        Sequence { state: first, rows: 0..lens[0] },
        Sequence { state: second, rows: lens[0]..lens[0] + lens[1] },
    ];
    let (tokens, positions) = (&tokens[..], &positions[..]);
    compute(&mut Batch { tokens, positions, stream: None, sequences: &mut sequences });
    for (state, len) in states.iter_mut().zip(lens) {
        state.settle(state.len() + len);
    }
}
