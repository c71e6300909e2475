//! The speed of the kernels on one thread: `cargo bench -p forebay-kernels -- 'one token/avx2/Q4_K'`.

#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;

use common::{Random, Stored};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use forebay_kernels::{
    Activation, Affine, AttentionStep, DType, DeltaStep, Encoding, Isa, KEY_BLOCK, Kernels, KvRef, Q8Panel,
    Rows, RunningSoftmax, STATE_COLUMNS, TileMut, Tiles,
};
use half::f16;

/// An expert's matrix of a 30 B model. It stays in a cache, so the benchmark measures arithmetic and not memory.
const ROWS: usize = 768;
const COLS: usize = 2048;

fn kernels() -> &'static Kernels {
    Kernels::detect().expect("FOREBAY_ISA names an instruction set of this machine")
}

/// All block types, and the encodings in planes that published models have.
fn encodings() -> impl Iterator<Item = Encoding> {
    let affine = |bits| Encoding::Affine(Affine { bits, group: 64, scales: DType::BF16 });
    let tiles = Tiles { rows: 128, cols: 128, scales: DType::F32 };
    DType::computable()
        .map(Encoding::Blocks)
        .chain([2, 3, 4, 5, 6, 8].map(affine))
        .chain([Encoding::Mxfp4, Encoding::Tiles(tiles)])
}

/// `tokens` activations in the form that the type needs, and a function that computes the product.
fn product(kernels: &'static Kernels, encoding: Encoding, tokens: usize) -> impl FnMut() {
    let mut random = Random(1);
    let weights = Stored::random(&mut random, encoding, ROWS, COLS);
    let x = random.normals(tokens * COLS);
    let mut panels = vec![Q8Panel::default(); tokens * Q8Panel::count(COLS)];
    if let Some(block) = encoding.activation_block() {
        for (x, panels) in x.chunks(COLS).zip(panels.chunks_mut(Q8Panel::count(COLS))) {
            (kernels.quantise)(x, block, panels);
        }
    }
    let mut out = vec![0.0; tokens * ROWS];
    move || {
        let w = black_box(&weights).view();
        let mut tile = TileMut::new(&mut out, ROWS);
        if encoding.activation_block().is_none() {
            (kernels.matmul_f32)(w, Rows::new(&x, COLS), &mut tile);
        } else {
            (kernels.matmul_q8)(w, Rows::new(&panels, Q8Panel::count(COLS)), &mut tile);
        }
        black_box(&mut out);
    }
}

/// In bytes of weights per second.
fn one_token(c: &mut Criterion) {
    let mut group = c.benchmark_group("one token");
    for isa in Isa::available() {
        for encoding in encodings() {
            let bytes: usize = encoding.plane_bytes(ROWS, COLS).expect("whole blocks").iter().sum();
            group.throughput(Throughput::Bytes(bytes as u64));
            let mut product = product(Kernels::for_isa(isa), encoding, 1);
            group.bench_function(BenchmarkId::new(isa.name(), encoding), |b| b.iter(&mut product));
        }
    }
}

/// In multiply-adds per second.
fn many_tokens(c: &mut Criterion) {
    for tokens in [4, 32, 128] {
        let mut group = c.benchmark_group(format!("{tokens} tokens"));
        group.throughput(Throughput::Elements((tokens * ROWS * COLS) as u64));
        for isa in Isa::available() {
            for encoding in encodings() {
                let mut product = product(Kernels::for_isa(isa), encoding, tokens);
                group.bench_function(BenchmarkId::new(isa.name(), encoding), |b| b.iter(&mut product));
            }
        }
    }
}

/// A block of keys and values for the query heads that share them: a few heads, and the many heads of latent attention,
/// whose values are inside their keys.
fn attention(c: &mut Criterion) {
    let mut random = Random(2);
    let mut group = c.benchmark_group("attention");
    for (heads, head_dim, value_dim) in [(1, 128, 128), (2, 64, 64), (8, 128, 128), (64, 576, 512)] {
        let queries = random.normals(heads * head_dim);
        let keys: Vec<f16> = random.normals(KEY_BLOCK * head_dim).into_iter().map(f16::from_f32).collect();
        let values = &keys[head_dim - value_dim..];
        let mut running = vec![RunningSoftmax::START; heads];
        let mut out = vec![0.0; heads * value_dim];
        group.throughput(Throughput::Elements((KEY_BLOCK * heads * (head_dim + value_dim)) as u64));
        for isa in Isa::available().into_iter().filter(|&isa| isa != Isa::Scalar) {
            let kernels = Kernels::for_isa(isa);
            let name = format!("{heads} heads of {head_dim}");
            group.bench_function(BenchmarkId::new(isa.name(), name), |b| {
                b.iter(|| {
                    let step = AttentionStep {
                        queries: black_box(&queries),
                        keys: KvRef::F16(&keys),
                        values: KvRef::F16(values),
                        head_dim,
                        value_dim,
                        value_stride: head_dim,
                        scale: 0.1,
                    };
                    (kernels.attend)(&step, &mut running, &mut out);
                    black_box(&mut out);
                });
            });
        }
    }
}

/// One token of a layer with 32 value heads of 128×128, with the state in place and moved from elsewhere.
fn delta_rule(c: &mut Criterion) {
    const HEADS: usize = 32;
    const DIM: usize = 128;
    const BLOCK: usize = DIM * STATE_COLUMNS;
    let mut random = Random(4);
    let (q, mut k) = (random.normals(DIM), random.normals(DIM));
    (kernels().l2_norm)(&mut k, 1e-6, 1.0);
    let v: [f32; STATE_COLUMNS] = random.normals(STATE_COLUMNS).try_into().expect("as many");
    let before = random.normals(HEADS * DIM * DIM);
    let mut state = before.clone();
    let mut out = [0.0; STATE_COLUMNS];
    let mut group = c.benchmark_group("delta rule");
    group.throughput(Throughput::Elements((HEADS * DIM * DIM) as u64));
    for isa in Isa::available().into_iter().filter(|&isa| isa != Isa::Scalar) {
        let kernels = Kernels::for_isa(isa);
        let step = DeltaStep { q: &q, k: &k, v: &v, keep: 0.99, correct: 0.5 };
        group.bench_function(BenchmarkId::new(isa.name(), "one token"), |b| {
            b.iter(|| {
                for (before, state) in before.chunks_exact(BLOCK).zip(state.chunks_exact_mut(BLOCK)) {
                    (kernels.delta_step)(black_box(&step), Some(before), state, &mut out);
                }
                black_box(&mut out);
            });
        });
        // Many tokens find the columns in the first-level cache.
        group.bench_function(BenchmarkId::new(isa.name(), "of many tokens"), |b| {
            b.iter(|| {
                for _ in 0..HEADS * DIM / STATE_COLUMNS {
                    (kernels.delta_step)(black_box(&step), None, &mut state[..BLOCK], &mut out);
                }
                black_box(&mut out);
            });
        });
    }
}

/// Kernels that work on one row of activations.
fn rows(c: &mut Criterion) {
    let mut random = Random(3);
    let (x, y) = (random.normals(COLS), random.normals(COLS));
    let mut panels = vec![Q8Panel::default(); Q8Panel::count(COLS)];
    let mut group = c.benchmark_group("row");
    group.throughput(Throughput::Elements(COLS as u64));
    group.bench_function("quantise", |b| {
        b.iter(|| (kernels().quantise)(black_box(&x), Q8Panel::LEN, black_box(&mut panels)));
    });
    // They work in place. Applied to their own output, values would shrink to slow subnormal numbers.
    let mut out = x.clone();
    group.bench_function("rms_norm", |b| {
        b.iter(|| {
            out.copy_from_slice(&x);
            (kernels().rms_norm)(black_box(&mut out), &y, 1e-6);
        });
    });
    group.bench_function("swiglu", |b| {
        b.iter(|| {
            out.copy_from_slice(&x);
            (kernels().activate)(black_box(&mut out), &y, Activation::SwiGlu);
        });
    });
}

criterion_group! {
    name = benches;
    // Long enough to tell a few per cent apart, short enough to be run often.
    config = Criterion::default()
        .sample_size(30)
        .warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1));
    targets = one_token, many_tokens, attention, delta_rule, rows
}
criterion_main!(benches);
