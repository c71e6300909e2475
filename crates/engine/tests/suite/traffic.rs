//! The bytes that one token reads, counted by hand.

use std::path::Path;

use forebay_engine::plan::Traffic;
use forebay_engine::{Engine, Options, Precision};

use crate::common::models::containers;
use crate::common::tiny_model::tiny_model;

/// The floats of a layer's dense weights with 32 hidden channels: norms, queries, keys, values, output, router.
const LAYER: u64 = (32 + 8 + 8 + 32) + 32 * 32 + 16 * 32 + 16 * 32 + 32 * 32 + 4 * 32;

/// Two layers with two of four experts, each of three matrices.
const EXPERTS: u64 = 2 * 2 * (3 * 16 * 32) * 4;

fn traffic(model: &[u8], precision: Precision) -> Traffic {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, model).unwrap();
    traffic_of(&path, precision)
}

fn traffic_of(model: &Path, precision: Precision) -> Traffic {
    Engine::open(model, &Options::default().precision(precision)).unwrap().traffic()
}

/// The experts of the tiny models have weights of two bytes.
#[test]
fn a_token_reads_the_matrices_that_its_experts_have() {
    for (family, expected) in [
        // Two layers, three experts of three matrices, each with a small expert of three matrices.
        ("grovemoe", 2 * 3 * (3 * 64 * 64 + 3 * 32 * 64) * 2),
        // Three layers with experts, of which a token uses three, of two matrices.
        ("nemotron_h_moe", 3 * 3 * (2 * 64 * 64) * 2),
        ("nemotron_h_latent", 3 * 3 * (2 * 64 * 32) * 2),
    ] {
        for model in containers(family) {
            assert_eq!(traffic_of(&model, Precision::Fast).experts, expected, "{}", model.display());
        }
    }
}

#[test]
fn a_token_reads_one_row_of_the_embeddings_and_the_experts_it_uses() {
    let model = tiny_model(32);
    // The last norm, the output matrix of 16 tokens, a row of the table.
    let dense = (2 * LAYER + 32 + 16 * 32 + 32) * 4;
    // Two layers with keys and values of two heads of 8 channels.
    let fast = Traffic { dense, experts: EXPERTS, position: 2 * 2 * (8 + 8) * 2, windows: 0, recurrent: 0 };
    assert_eq!(traffic(&model.build(), Precision::Fast), fast);
    assert_eq!(traffic(&model.build(), Precision::Exact), Traffic { position: 2 * fast.position, ..fast });
    assert_eq!(fast.bytes(10), dense + EXPERTS + 10 * fast.position);

    // A table that is also the output matrix is read whole for that: the same bytes.
    let tied = model.without_tensor("output.weight").build();
    assert_eq!(traffic(&tied, Precision::Fast), fast);
}
