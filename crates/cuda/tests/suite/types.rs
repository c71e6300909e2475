//! Which types the GPU supports. These tests need no GPU.

use forebay_kernels::{Affine, DType, Encoding, Tiles};

#[test]
fn all_types_of_gguf_files_have_kernels() {
    for dtype in DType::computable() {
        assert!(forebay_cuda::computes(dtype.into()), "{dtype}");
    }
}

#[test]
fn all_types_of_folders_have_kernels() {
    let affine = |bits| Encoding::Affine(Affine { bits, group: 64, scales: DType::BF16 });
    let tiles = |scales| Encoding::Tiles(Tiles { rows: 128, cols: 128, scales });
    let others = [Encoding::Mxfp4, Encoding::Columns(DType::F16), tiles(DType::F32)];
    for encoding in [2, 3, 4, 5, 6, 8].map(affine).into_iter().chain(others) {
        assert!(forebay_cuda::computes(encoding), "{encoding}");
    }
    // All except one kind of scales.
    let powers = tiles(DType::F8_E8M0);
    assert!(powers.is_computable() && !forebay_cuda::computes(powers));
}
