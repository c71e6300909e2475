//! The speed of products on the GPU: `cargo bench -p forebay-gpu -- Q4_K`. For one row of activations in gigabytes of
//! weights per second, for a prompt in thousands of millions of multiplications with additions per second.

use std::sync::Arc;
use std::time::Instant;

use forebay_device_tests::kernels::matrix;
use forebay_engine::internals::backend::{Backend, Buf, BufShape, Matrix, Precision, Weight};
use forebay_engine::internals::experts::Device;
use forebay_gpu::{PortableGpu, Variants, find};
use forebay_kernels::{Affine, DType, Encoding, Tiles};

/// Matrices of a 30 B model: of attention, of an expert, of the output, which has fewer rows here.
const SHAPES: [[usize; 2]; 3] = [[4096, 2048], [768, 2048], [32768, 2048]];
const TOKENS: [usize; 5] = [1, 4, 8, 32, 512];

/// Matrices of one shape that are multiplied in turn, so that they are in no cache.
const COPIES: usize = 16;

fn encodings() -> impl Iterator<Item = Encoding> {
    let affine = |bits| Encoding::Affine(Affine { bits, group: 64, scales: DType::BF16 });
    let tiles = Tiles { rows: 128, cols: 128, scales: DType::F32 };
    DType::computable()
        .map(Encoding::Blocks)
        .chain([2, 3, 4, 5, 6, 8].map(affine))
        .chain([Encoding::Mxfp4, Encoding::Tiles(tiles)])
}

/// Seconds of a product, from the time of many.
fn seconds(b: &mut dyn Backend, [x, out]: [Buf; 2], tokens: usize) -> f64 {
    let mut row = vec![0.0; out.width()];
    let mut run = |times: usize| {
        b.begin(tokens);
        let start = Instant::now();
        for i in 0..times {
            b.matmul(x, &[(Matrix::nth(i % COPIES), out)]).expect("a product");
        }
        b.read_row(out, 0, &mut row).expect("its result");
        start.elapsed().as_secs_f64()
    };
    // The first run compiles the kernel. Starting and reading takes as long whatever the number of products.
    run(1);
    let one = run(1);
    let times = ((0.3 / one) as usize).clamp(1, 20 * COPIES);
    (run(1 + times) - one) / times as f64
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let found = find().expect("a GPU");
    println!("{}", found[0].name());
    let gpu = Arc::new(PortableGpu::open(&found[0], None, Variants::ALL).expect("it opens"));
    for encoding in encodings() {
        let name = encoding.to_string();
        if !wanted.is_empty() && !wanted.contains(&name) {
            continue;
        }
        for [rows, cols] in SHAPES {
            let most = TOKENS[TOKENS.len() - 1];
            let shapes = [cols, rows].map(|width| BufShape { rows: most, width });
            let mut builder = gpu.executor(Precision::Fast, &shapes).expect("buffers");
            let b = builder.backend();
            let weights = matrix(encoding, rows, cols, 1);
            let bytes: usize = weights.planes.iter().map(|plane| plane.len()).sum();
            for _ in 0..COPIES {
                // Each copy in memory of its own.
                let planes = weights.planes.each_ref().map(|plane| plane[..].into());
                let copy = forebay_engine::internals::backend::HostMatrix { planes, ..weights };
                b.load(Weight::Matrix(copy)).expect("room");
            }
            let buffers = [Buf::nth(0, cols), Buf::nth(1, rows)];
            b.begin(most);
            b.write(buffers[0], &vec![0.5; most * cols]).expect("activations");
            print!("{name:24} [{rows:5}, {cols}]");
            for tokens in TOKENS {
                let time = seconds(b, buffers, tokens);
                match tokens {
                    ..=8 => {
                        print!("  {tokens}: {:6.1} µs {:6.1} GB/s", time * 1e6, bytes as f64 / time / 1e9)
                    }
                    _ => print!("  {tokens}: {:8.1} G/s", (rows * cols * tokens) as f64 / time / 1e9),
                }
            }
            println!();
        }
    }
}
