//! Dequantisation, to the bit, against the `gguf` package. `tools/quant_vectors.py` makes the vectors.

use forebay_kernels::DType;
use forebay_kernels::quant::dequantise_row;
use safetensors::SafeTensors;

#[test]
fn every_type_dequantises_as_the_gguf_package_does() {
    let read = |name| std::fs::read(format!("{}/tests/data/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let (most, iq) = (read("quants.safetensors"), read("iq.safetensors"));
    let (most, iq) = (SafeTensors::deserialize(&most).unwrap(), SafeTensors::deserialize(&iq).unwrap());
    // Dequantising F32 changes nothing.
    for dtype in DType::computable().filter(|&dtype| dtype != DType::F32) {
        let file = if dtype.name().starts_with("IQ") { &iq } else { &most };
        let tensor = |part| file.tensor(&format!("{dtype}.{part}")).unwrap();
        let (blocks, values) = (tensor("blocks"), tensor("values"));
        let expected: Vec<f32> =
            values.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert!(expected.len() >= 24 * dtype.block_len());
        let mut ours = vec![f32::NAN; expected.len()];
        dequantise_row(dtype, blocks.data(), &mut ours);
        for (i, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
            let same = ours.to_bits() == expected.to_bits() || ours.is_nan() && expected.is_nan();
            assert!(same, "{dtype}, weight {i}: {ours} instead of {expected}");
        }
    }
}
