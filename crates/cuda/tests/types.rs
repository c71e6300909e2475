//! A type that there are no kernels for is refused before anything is loaded. No GPU is needed.

#[path = "../../engine/tests/common/gguf_builder.rs"]
mod gguf_builder;
#[path = "../../engine/tests/common/tiny_model.rs"]
mod tiny_model;

use std::sync::Arc;

use forebay_engine::backend::{Backend, BufShape, Device, Precision};
use forebay_engine::memory::SharedBytes;
use forebay_engine::{Error, Options, Prospect, Result};
use forebay_kernels::{Affine, DType, Encoding, Tiles};
use tiny_model::{EXPERTS, HEAD_DIM, HEADS, INNER, tiny_model};

const HIDDEN: u64 = 256;

/// A GPU that is asked and never used.
struct Described;

impl Device for Described {
    fn backend(&self, _: Precision, _: &[BufShape]) -> Result<Box<dyn Backend>> {
        panic!("nothing is to be loaded")
    }

    fn computes(&self, encoding: Encoding) -> bool {
        forebay_cuda::computes(encoding)
    }

    fn memory(&self) -> u64 {
        1 << 40
    }

    fn chunk(&self) -> usize {
        512
    }

    fn link_speed(&self) -> Result<f64> {
        panic!("nothing is to be measured")
    }

    fn pin(&self, _: SharedBytes) -> Result<Box<dyn Send>> {
        panic!("nothing is to be loaded")
    }
}

#[test]
fn a_type_without_kernels_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let options = Options { device: Some(Arc::new(Described)), threads: Some(1), ..Options::default() };
    let dense = ("blk.1.attn_q.weight", &[HIDDEN, HEADS * HEAD_DIM][..]);
    let experts = ("blk.1.ffn_up_exps.weight", &[HIDDEN, INNER, EXPERTS][..]);
    let mut refused = 0;
    for dtype in DType::computable() {
        let id = (0..).find(|&id| DType::from_ggml(id) == Some(dtype)).expect("every type has an identifier");
        for (tensor, dims) in [dense, experts] {
            let weights: u64 = dims.iter().product();
            let bytes = weights as usize / dtype.block_len() * dtype.block_bytes();
            let file = tiny_model(HIDDEN).without_tensor(tensor).tensor(tensor, id, dims, bytes);
            std::fs::write(&path, file.build()).unwrap();
            match Prospect::new(&path, &options) {
                Ok(_) => assert!(forebay_cuda::computes(dtype.into()), "{dtype} in {tensor}"),
                Err(Error::Unsupported(message)) => {
                    assert!(!forebay_cuda::computes(dtype.into()), "{message}");
                    for part in ["model.gguf", tensor, dtype.name(), "--device cpu"] {
                        assert!(message.contains(part), "no {part:?} in: {message}");
                    }
                    refused += 1;
                }
                Err(other) => panic!("{other:?}"),
            }
            // The processor computes it.
            Prospect::new(&path, &Options::default()).unwrap();
        }
    }
    assert!(refused > 0);
}

#[test]
fn of_folders_some_types_have_kernels() {
    let affine = |bits| Encoding::Affine(Affine { bits, group: 64, scales: DType::BF16 });
    let computed = [4, 8].map(affine).into_iter().chain([Encoding::Mxfp4, Encoding::Columns(DType::F16)]);
    for encoding in computed {
        assert!(forebay_cuda::computes(encoding), "{encoding}");
    }
    let tiles = Encoding::Tiles(Tiles { rows: 128, cols: 128, scales: DType::F32 });
    for encoding in [2, 3, 5, 6].map(affine).into_iter().chain([tiles]) {
        assert!(encoding.is_computable() && !forebay_cuda::computes(encoding), "{encoding}");
    }
}
