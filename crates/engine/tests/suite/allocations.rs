//! After the buffers have grown, computing and choosing a token allocate nothing.

use forebay_engine::internals::generate::sampler::{Sampler, SamplingParams};
use forebay_engine::{Engine, Options, TokenId};
use forebay_testing::golden;

use crate::common::memory::measure;

#[test]
fn choosing_a_token_allocates_nothing_after_the_first_ones() {
    const VOCAB: usize = 5000;
    let params = SamplingParams {
        temperature: 3.0,
        top_k: 0,
        repeat_penalty: 1.1,
        frequency_penalty: 0.1,
        seed: Some(1),
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::new(params, VOCAB).unwrap();
    let logits: Vec<f32> = (0..VOCAB).map(|i| (i * 7919 % VOCAB) as f32 / 500.0).collect();
    let mut generate = |tokens| {
        let ((), used) = measure(|| {
            for _ in 0..tokens {
                let token = sampler.sample(&logits).unwrap();
                sampler.accept(token);
            }
        });
        used.allocations
    };
    generate(1);
    assert_eq!(generate(2000), 0);
}

/// With one thread, all work is the caller's, whose allocations are counted. Other threads would run the same loops.
#[test]
fn computing_a_token_allocates_only_pages_of_the_kv_cache() {
    for model in ["qwen3moe", "qwen3next", "qwen35moe", "gpt_oss", "deepseek_v3", "lfm2_moe"] {
        let path = golden(&format!("{model}.gguf"));
        let options = Options::default().threads(1);
        let engine = Engine::open(&path, &options).unwrap();
        let mut session = engine.session();
        session.extend(&[TokenId(1), TokenId(2), TokenId(3)]).unwrap();
        // Attention allocates its scratch memory when it is computed for the first time.
        for token in 0..8 {
            session.push(TokenId(token)).unwrap();
        }
        // Once a second, the engine asks the system how much memory is free, which allocates. The other runs must not.
        let least = (0..3).map(|_| {
            let ((), used) = measure(|| {
                for token in 0..12 {
                    session.push(TokenId(token)).unwrap();
                }
            });
            used.allocations
        });
        assert_eq!(least.min(), Some(0), "{model}");
    }
}
