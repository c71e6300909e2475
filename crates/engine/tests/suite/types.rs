//! Every type that the kernels support runs in a model.

#[path = "../../../kernels/tests/common/mod.rs"]
mod weights;

use forebay_engine::{Engine, Options, Precision, TokenId};
use forebay_kernels::DType;
use forebay_testing::{assert_same_bits, relative_error};
use weights::Random;

use crate::common::tiny_model::{EXPERTS, HEAD_DIM, HEADS, INNER, VOCAB, tiny_model};

const HIDDEN: u64 = 256;

/// A model whose matrices with rows of 256 weights are of this type.
fn model_of(dtype: DType) -> Vec<u8> {
    let id = (0..).find(|&id| DType::from_ggml(id) == Some(dtype)).expect("every type has an identifier");
    let mut random = Random(dtype as u64);
    let mut file = tiny_model(HIDDEN);
    let mut replace = |name: &str, dims: &[u64]| {
        let rows = dims[1..].iter().product::<u64>() as usize;
        let bytes = random.weights(dtype, rows, HIDDEN as usize);
        file = file.clone().without_tensor(name).tensor_of(name, id, dims, bytes);
    };
    replace("token_embd.weight", &[HIDDEN, VOCAB]);
    replace("output.weight", &[HIDDEN, VOCAB]);
    for layer in 0..2 {
        replace(&format!("blk.{layer}.attn_q.weight"), &[HIDDEN, HEADS * HEAD_DIM]);
        replace(&format!("blk.{layer}.ffn_gate_exps.weight"), &[HIDDEN, INNER, EXPERTS]);
        replace(&format!("blk.{layer}.ffn_up_exps.weight"), &[HIDDEN, INNER, EXPERTS]);
    }
    file.build()
}

#[test]
fn every_type_runs_and_fast_stays_close_to_exact() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = [1, 5, 2, 0, 9, 3, 7].map(TokenId);
    for dtype in DType::computable().filter(|dtype| !dtype.is_float()) {
        let path = folder.path().join(format!("{dtype}.gguf"));
        std::fs::write(&path, model_of(dtype)).unwrap();
        let [fast, exact] = [Precision::Fast, Precision::Exact].map(|precision| {
            let options = Options::default().precision(precision).threads(2);
            let engine = Engine::open(&path, &options).unwrap();
            let mut at_once = engine.session();
            at_once.extend(&tokens).unwrap();
            let mut one_by_one = engine.session();
            tokens.iter().for_each(|&token| one_by_one.push(token).unwrap());
            assert_same_bits(at_once.logits(), one_by_one.logits(), &format!("{dtype}: one token and many"));
            at_once.logits().to_vec()
        });
        let error = relative_error(&fast, &exact);
        // Random weights make attention sharp, which amplifies small errors; a misread type is off by one or more.
        assert!(error < 0.1, "{dtype}: {error}");
    }
}
