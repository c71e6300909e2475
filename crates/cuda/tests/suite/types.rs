//! Which types the GPU computes with. One that there are no kernels for is refused before anything is loaded. No GPU is needed.

use std::sync::Arc;

use forebay_engine::backend::{BufShape, Precision};
use forebay_engine::experts::{Device, ExecutorBuilder};
use forebay_engine::memory::SharedBytes;
use forebay_engine::{Error, Options, Prospect, Result};
use forebay_kernels::{Affine, DType, Encoding, Tiles};

use crate::common::tiny_model::{EXPERTS, HEAD_DIM, HEADS, INNER, tiny_model};

const HIDDEN: u64 = 256;

/// A GPU that is asked and never used. It has kernels for all types but one.
struct Without(Encoding);

impl Device for Without {
    fn executor(&self, _: Precision, _: &[BufShape]) -> Result<Box<dyn ExecutorBuilder>> {
        panic!("nothing is to be loaded")
    }

    fn computes(&self, encoding: Encoding) -> bool {
        encoding != self.0
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
    let dense = ("blk.1.attn_q.weight", &[HIDDEN, HEADS * HEAD_DIM][..]);
    let experts = ("blk.1.ffn_up_exps.weight", &[HIDDEN, INNER, EXPERTS][..]);
    // The rest of the model is F32.
    for dtype in DType::computable().filter(|&dtype| dtype != DType::F32) {
        let device = Some(Arc::new(Without(dtype.into())) as Arc<dyn Device>);
        let options = Options { device, threads: Some(1), ..Options::default() };
        let id = (0..).find(|&id| DType::from_ggml(id) == Some(dtype)).expect("every type has an identifier");
        for (tensor, dims) in [dense, experts] {
            let weights: u64 = dims.iter().product();
            let bytes = weights as usize / dtype.block_len() * dtype.block_bytes();
            let file = tiny_model(HIDDEN).without_tensor(tensor).tensor(tensor, id, dims, bytes);
            std::fs::write(&path, file.build()).unwrap();
            match Prospect::new(&path, &options) {
                Err(Error::Unsupported(message)) => {
                    for part in ["model.gguf", tensor, dtype.name(), "Options::device = None"] {
                        assert!(message.contains(part), "no {part:?} in: {message}");
                    }
                }
                Ok(_) => panic!("{dtype} in {tensor} is taken"),
                Err(other) => panic!("{other:?}"),
            }
            // The processor computes it.
            Prospect::new(&path, &Options::default()).unwrap();
        }
    }
}

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
    // But for one kind of scales.
    let powers = tiles(DType::F8_E8M0);
    assert!(powers.is_computable() && !forebay_cuda::computes(powers));
}
