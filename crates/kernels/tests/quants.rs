//! Dequantisation, to the bit, against the `gguf` package. `tools/quant_vectors.py` makes the vectors.

use forebay_kernels::DType;
use forebay_kernels::quant::dequantise_row;
use safetensors::SafeTensors;

#[test]
fn every_type_dequantises_as_the_gguf_package_does() {
    let bytes = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/quants.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    // F32 is its own dequantisation.
    for dtype in DType::computable().filter(|&dtype| dtype != DType::F32) {
        let tensor = |part| file.tensor(&format!("{dtype}.{part}")).unwrap();
        let (blocks, values) = (tensor("blocks"), tensor("values"));
        let expected: Vec<f32> =
            values.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert!(expected.len() >= 24 * dtype.block_len());
        let mut ours = vec![f32::NAN; expected.len()];
        dequantise_row(dtype, blocks.data(), &mut ours);
        for (i, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
            // Equality of values, since the package gives −0 where we give 0.
            assert!(ours == expected, "{dtype}, weight {i}: {ours} instead of {expected}");
        }
    }
}
