//! Dequantisation from planes, to the bit, against mlx and ml_dtypes. `tools/plane_vectors.py` makes the vectors.

use forebay_kernels::{Affine, DType, Encoding, MatRef, Planes, Tiles};
use safetensors::SafeTensors;

fn check(file: &SafeTensors<'_>, name: &str, encoding: Encoding, rows: usize, cols: usize) {
    let part = |part: &str| file.tensor(&format!("{name}.{part}")).map(|t| t.data().to_vec());
    let (codes, scales, biases) =
        (part("codes").unwrap(), part("scales").unwrap(), part("biases").unwrap_or_default());
    let w =
        MatRef::from_planes(encoding, rows, cols, Planes { codes: &codes, scales: &scales, biases: &biases });
    let expected: Vec<f32> =
        part("values").unwrap().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(expected.len(), rows * cols);
    let mut row = vec![f32::NAN; cols];
    for (r, expected) in expected.chunks_exact(cols).enumerate() {
        w.dequantise_row(r, &mut row);
        for (c, (ours, expected)) in row.iter().zip(expected).enumerate() {
            assert!(ours == expected, "{encoding}, weight {r}, {c}: {ours} instead of {expected}");
        }
    }
}

#[test]
fn planes_dequantise_as_mlx_and_ml_dtypes_do() {
    let bytes = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/planes.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            for scales in [DType::F32, DType::F16, DType::BF16] {
                let name = format!("affine.{bits}.{group}.{scales}");
                check(&file, &name, Encoding::Affine(Affine { bits, group, scales }), 2, 2 * group);
            }
        }
    }
    check(&file, "fp8", Encoding::Tiles(Tiles { rows: 4, cols: 32, scales: DType::F32 }), 8, 64);
    check(&file, "mxfp4", Encoding::Mxfp4, 62, 128);
}
