#[path = "../../kernels/tests/common/mod.rs"]
mod common;
use common::Random;
use forebay_engine::memory::SharedBytes;
use forebay_kernels::quant::activation_block;
use forebay_kernels::*;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let dtype = DType::computable().find(|d| d.name() == a[1]).unwrap();
    let (rows, cols, tokens, reps): (usize, usize, usize, usize) =
        (a[2].parse().unwrap(), a[3].parse().unwrap(), a[4].parse().unwrap(), a[5].parse().unwrap());
    let k = Kernels::detect().unwrap();
    let mut r = Random(1);
    let w = r.weights(dtype, rows, cols);
    let w = SharedBytes::from(w.as_slice());
    let x = r.normals(tokens * cols);
    let width = Q8Panel::count(cols);
    let mut panels = vec![Q8Panel::default(); tokens * width];
    if !dtype.is_float() {
        for (x, p) in x.chunks_exact(cols).zip(panels.chunks_exact_mut(width)) {
            (k.quantise)(x, activation_block(dtype), p);
        }
    }
    let mut out = vec![0.0; tokens * rows];
    let mut best = f64::MAX;
    for _ in 0..reps {
        let t = std::time::Instant::now();
        let w = MatRef::new(dtype, rows, cols, &w);
        if dtype.is_float() {
            (k.matmul_f32)(w, Rows::new(&x, cols), &mut TileMut::new(&mut out, rows));
        } else {
            (k.matmul_q8)(w, Rows::new(&panels, width), &mut TileMut::new(&mut out, rows));
        }
        best = best.min(t.elapsed().as_secs_f64());
    }
    let blocks = (rows * cols) as f64 / 256.0;
    let bytes = dtype.row_bytes(256).unwrap() as f64;
    println!(
        "{dtype} x{tokens}: {:.1} ns per row-block, {:.1} GB/s, {:.1} GMAC/s",
        best / blocks * 1e9,
        bytes * blocks / best / 1e9,
        blocks * 256.0 * tokens as f64 / best / 1e9
    );
}
