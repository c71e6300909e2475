//! A token's logits depend only on the model and the tokens before it: not on how a prompt is cut into chunks, not on
//! the number of threads, not on how the tokens were added.

use std::path::Path;

use forebay_engine::{Engine, Options, Precision, TokenId};
use forebay_testing::assert_same_bits;

use crate::common::models::{DENSE, MIXTURES, containers, data, demo_model, logits, random_tokens, trained};

const PRECISIONS: [Precision; 2] = [Precision::Fast, Precision::Exact];

/// Chunk sizes and thread counts of the runs that are compared with the first one.
const CUTS: [(usize, usize); 4] = [(40, 1), (1, 3), (7, 2), (33, 3)];

#[test]
fn chunks_and_threads_change_no_bit_of_the_tiny_model() {
    for precision in PRECISIONS {
        compare_cuts(&data("golden/qwen3moe.gguf"), precision, &random_tokens(40, 160, 1), &CUTS);
    }
}

#[test]
fn chunks_and_threads_change_no_bit_of_any_family() {
    for model in MIXTURES.iter().chain(DENSE).copied().flat_map(containers) {
        for precision in PRECISIONS {
            compare_cuts(&model, precision, &random_tokens(40, 512, 8), &CUTS);
        }
    }
}

/// Types of weights that the tiny models do not have.
#[test]
fn chunks_and_threads_change_no_bit_of_trained_models() {
    for model in ["tales-deepseek_v3-Q4_K_M.gguf", "tales-deepseek_v3-mlx-4bit"] {
        if let Some(model) = trained(model) {
            compare_cuts(&model, Precision::Fast, &random_tokens(40, 4096, 9), &CUTS);
        }
    }
}

#[test]
fn chunks_and_threads_change_no_bit_of_the_demo_model_when_fast() {
    compare_cuts(&demo_model(), Precision::Fast, &random_tokens(40, 4096, 2), &CUTS);
}

#[test]
fn chunks_and_threads_change_no_bit_of_the_demo_model_when_exact() {
    compare_cuts(&demo_model(), Precision::Exact, &random_tokens(40, 4096, 3), &CUTS);
}

/// The KV cache has pages of 64 positions, so the prompt fills two and starts a third.
#[test]
fn a_prompt_of_several_pages_may_be_cut_anywhere() {
    let cuts = [(512, 2), (13, 3)];
    compare_cuts(&demo_model(), Precision::Fast, &random_tokens(150, 4096, 4), &cuts);
    for precision in PRECISIONS {
        let cuts = [(512, 2), (1, 1), (64, 2), (65, 3), (13, 1)];
        for model in ["golden/qwen3moe.gguf", "golden/deepseek_v3.gguf", "golden/deepseek_v3"] {
            compare_cuts(&data(model), precision, &random_tokens(150, 160, 5), &cuts);
        }
    }
}

/// Layers with a window of 16 positions drop earlier pages, between chunks and inside a prompt.
#[test]
fn windows_may_be_cut_anywhere() {
    let tokens = random_tokens(200, 512, 9);
    for precision in PRECISIONS {
        let cuts = [(512, 2), (1, 1), (64, 2), (65, 3), (13, 1)];
        compare_cuts(&data("golden/gpt_oss-mxfp4"), precision, &tokens, &cuts);
        compare_pieces(&data("golden/gpt_oss-mxfp4"), precision, &tokens);
    }
}

#[test]
fn tokens_added_one_by_one_or_in_pieces_give_the_bits_of_the_whole() {
    let tiny = data("golden/qwen3moe.gguf");
    for precision in PRECISIONS {
        compare_pieces(&tiny, precision, &random_tokens(150, 160, 6));
        compare_pieces(&data("golden/deepseek_v3.gguf"), precision, &random_tokens(150, 160, 6));
        compare_pieces(&demo_model(), precision, &random_tokens(12, 4096, 7));
    }
}

fn options(precision: Precision, chunk: usize, threads: usize) -> Options {
    Options::default().precision(precision).chunk(chunk).threads(threads)
}

/// Compares the logits of every position, for each chunk size and number of threads.
fn compare_cuts(model: &Path, precision: Precision, tokens: &[TokenId], cuts: &[(usize, usize)]) {
    let mut runs = cuts.iter().map(|&(chunk, threads)| {
        let name = format!("{precision:?}, chunks of {chunk}, {threads} threads");
        (name, logits(model, &options(precision, chunk, threads), tokens))
    });
    let (_, first) = runs.next().unwrap();
    for (name, run) in runs {
        assert_same_bits(&run, &first, &name);
    }
}

/// Compares the logits after the last token, at every position for `push` and at some for `extend`.
fn compare_pieces(model: &Path, precision: Precision, tokens: &[TokenId]) {
    let options = options(precision, 512, 2);
    let whole = logits(model, &options, tokens);
    let engine = Engine::open(model, &options).unwrap();
    let row = |position: usize| &whole[position * engine.vocab_size()..][..engine.vocab_size()];

    let mut session = engine.session();
    for (position, &token) in tokens.iter().enumerate() {
        session.push(token).unwrap();
        assert_same_bits(session.logits(), row(position), &format!("{precision:?}, push {position}"));
    }
    let mut session = engine.session();
    for end in [1, 2, 9, tokens.len() - 1, tokens.len()] {
        session.extend(&tokens[..end]).unwrap();
        assert_same_bits(session.logits(), row(end - 1), &format!("{precision:?}, extend to {end}"));
    }
}
