//! How much a GPU that shares the processor's memory is given to do for a token. Some numbers are exact, so that a change
//! of the schedule is seen without a fast GPU.

use std::sync::Arc;

use forebay_device_tests::models::{data, options, random_tokens};
use forebay_device_tests::{TestDevice, run};
use forebay_engine::internals::experts::{Device, Meters};
use forebay_engine::plan::ExpertMemory;
use forebay_engine::{Engine, Precision};
use forebay_gpu::{Counts, PortableGpu};

use crate::common::{Best, Plain, counted};
use crate::unified::least;

const MODEL: &str = "golden/qwen3moe.gguf";
const LAYERS: u64 = 3;

/// What the GPU is given to do for each of some single tokens after a prompt, and what was asked of the store. Experts
/// have as little memory as possible, or all.
fn of_tokens<D: TestDevice<Device = PortableGpu>>(resident: bool) -> Option<(Vec<Counts>, Meters)> {
    let gpu = Arc::new(D::open(None).unwrap());
    if !gpu.shares_memory() {
        return None;
    }
    let on_gpu = options(Precision::Fast).device(Some(gpu.clone()));
    let memory = if resident { ExpertMemory::Percent(100.0) } else { least(&data(MODEL), &on_gpu) };
    let engine = Engine::open(&data(MODEL), &on_gpu.expert_memory(memory)).unwrap();
    assert_eq!(engine.routed_layers().len() as u64, LAYERS);
    let mut session = engine.session();
    let tokens = random_tokens(20, 50, 3);
    session.extend(&tokens[..12]).unwrap();
    let of_token = |&token| counted(&gpu, || session.push(token).unwrap());
    Some((tokens[12..].iter().map(of_token).collect(), engine.meters()))
}

fn a_resident_token_is_submitted_and_awaited_once<D: TestDevice<Device = PortableGpu>>() {
    let Some((tokens, _)) = of_tokens::<D>(true) else { return };
    for counts in tokens {
        // Besides the layers: the token's embedding, the last sum, the row's choice, its norm, and the logits.
        assert_eq!(counts, Counts { dispatches: 7 * LAYERS + 5, submits: 1, waits: 1, uploaded: 0 });
    }
}

fn a_streamed_token_uploads_nothing<D: TestDevice<Device = PortableGpu>>() {
    let Some((tokens, meters)) = of_tokens::<D>(false) else { return };
    assert!(meters.misses > 0, "{meters:?}");
    for counts in tokens {
        assert_eq!(counts.uploaded, 0);
        // The host learns of each layer's choice, and of the logits.
        assert!(counts.waits > LAYERS, "{counts:?}");
    }
}

#[test]
fn a_resident_token_of_the_best_is_submitted_and_awaited_once() {
    run::<Best>(a_resident_token_is_submitted_and_awaited_once::<Best>);
}

#[test]
fn a_resident_token_of_the_plain_is_submitted_and_awaited_once() {
    run::<Plain>(a_resident_token_is_submitted_and_awaited_once::<Plain>);
}

#[test]
fn a_streamed_token_of_the_best_uploads_nothing() {
    run::<Best>(a_streamed_token_uploads_nothing::<Best>);
}

#[test]
fn a_streamed_token_of_the_plain_uploads_nothing() {
    run::<Plain>(a_streamed_token_uploads_nothing::<Plain>);
}
