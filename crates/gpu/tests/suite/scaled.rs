//! Matrices with a scale of their own, which no other device computes.

use forebay_device_tests::TestDevice;
use forebay_device_tests::kernels::matrix;
use forebay_engine::TokenId;
use forebay_engine::internals::backend::{
    Backend, Buf, BufShape, CpuBackend, HeadMatrices, Matrix, Precision, Weight,
};
use forebay_engine::internals::experts::Device;
use forebay_kernels::{DType, Encoding};
use forebay_testing::relative_error;

const ROWS: usize = 40;
const COLS: usize = 64;
const TOKENS: usize = 20;

/// What every operation that reads such a matrix computes.
fn results(b: &mut dyn Backend) -> Vec<Vec<f32>> {
    let mut scaled = matrix(Encoding::Blocks(DType::Q8_0), ROWS, COLS, 1);
    scaled.scale = 0.375;
    b.load(Weight::Matrix(scaled)).unwrap();
    let [x, out] = [Buf::nth(0, COLS), Buf::nth(1, ROWS)];
    let tokens: Vec<TokenId> = (0..TOKENS as u32).map(TokenId).collect();
    let mut results = Vec::new();
    let mut read = |b: &mut dyn Backend, buf: Buf, rows: usize| {
        let mut numbers = vec![f32::NAN; rows * buf.width()];
        b.read(buf, &mut numbers).unwrap();
        results.push(numbers);
    };
    for rows in [1, 3, TOKENS] {
        b.begin(rows);
        b.embed(Matrix::nth(0), &tokens[..rows], x).unwrap();
        b.matmul(x, &[(Matrix::nth(0), out)]).unwrap();
        read(b, x, rows);
        read(b, out, rows);
        let w = HeadMatrices { stored: Matrix::nth(0), heads: 1, first: 0, rows: ROWS, transposed: true };
        b.head_products(out, &w, x).unwrap();
        read(b, x, rows);
        b.head_products(x, &HeadMatrices { transposed: false, ..w }, out).unwrap();
        read(b, out, rows);
    }
    results
}

/// The CPU's, in full precision.
pub fn matrices_with_a_scale_are_the_processors<D: TestDevice>() {
    let shapes = [COLS, ROWS].map(|width| BufShape { rows: TOKENS, width });
    let gpu = std::sync::Arc::new(D::open(None).unwrap());
    let ours = results(gpu.executor(Precision::Exact, &shapes).unwrap().backend());
    let truth = results(&mut CpuBackend::new(1, Precision::Exact, &shapes).unwrap());
    for (i, (ours, truth)) in ours.iter().zip(&truth).enumerate() {
        let error = relative_error(ours, truth);
        assert!(error < 1e-5, "result {i}: {error}");
    }
}
