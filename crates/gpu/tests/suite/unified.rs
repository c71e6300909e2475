//! A GPU that shares the processor's memory computes experts where the drive wrote them: how many of them are in memory
//! changes time and never bits, and none is copied.

use std::path::Path;
use std::sync::Arc;

use forebay_device_tests::models::{containers, data, options, random_tokens};
use forebay_device_tests::{TestDevice, run};
use forebay_engine::internals::experts::{Device, Meters};
use forebay_engine::plan::ExpertMemory;
use forebay_engine::{Cancel, Engine, Error, Options, Precision, Prospect, Session, TokenId, Turn};
use forebay_gpu::{Counts, PortableGpu};
use forebay_testing::assert_same_bits;

use crate::common::{Best, Plain, counted};

/// The logits of a prompt, of single tokens and of several conversations together, what was asked of the store, and what
/// the GPU was given to do for the last single token.
fn answer(model: &Path, options: &Options, gpu: &PortableGpu) -> (Vec<f32>, Meters, Counts) {
    let engine = Engine::open(model, options).unwrap();
    let tokens = random_tokens(30, 100, 21);
    let mut session = engine.session();
    session.extend(&tokens[..20]).unwrap();
    let mut all = session.logits().to_vec();
    let mut counts = Counts::default();
    for &token in &tokens[20..] {
        counts = counted(gpu, || session.push(token).unwrap());
        all.extend_from_slice(session.logits());
    }
    drop(session);
    let mut together: Vec<Session> = (0..6).map(|_| engine.session()).collect();
    let tokens: Vec<[TokenId; 1]> = (0..6).map(|i| [TokenId(11 * i)]).collect();
    let turn = |(session, tokens)| Turn { session, tokens, logits: true, marks: &[] };
    let mut turns: Vec<Turn<'_>> =
        together.iter_mut().zip(&tokens).map(|(s, t): (_, &[TokenId; 1])| turn((s, &t[..]))).collect();
    let mut step = engine.step(&mut turns, &Cancel::default()).unwrap();
    while let Some((_, mut row)) = step.next_row().unwrap() {
        all.extend_from_slice(row.all().unwrap());
    }
    step.finish().unwrap();
    (all, engine.meters(), counts)
}

/// The least memory for experts.
pub fn least(model: &Path, options: &Options) -> ExpertMemory {
    match Prospect::new(model, &options.clone().expert_memory(ExpertMemory::Bytes(1))) {
        Err(Error::Budget { need, .. }) => ExpertMemory::Bytes(need),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("one byte is enough for experts"),
    }
}

fn residency_changes_no_bit<D: TestDevice<Device = PortableGpu>>() {
    for (model, precision) in [
        (data("golden/qwen3moe.gguf"), Precision::Fast),
        (data("golden/qwen3moe.gguf"), Precision::Exact),
        (data("golden/gpt_oss-mxfp4"), Precision::Fast),
        (containers("grovemoe")[0].clone(), Precision::Fast),
    ] {
        let gpu = Arc::new(D::open(None).unwrap());
        if !gpu.shares_memory() {
            return;
        }
        let on_gpu = options(precision).chunk(12).device(Some(gpu.clone()));
        let whole = on_gpu.clone().expert_memory(ExpertMemory::Percent(100.0));
        let (expected, meters, counts) = answer(&model, &whole, &gpu);
        let name = model.display();
        assert_eq!((meters.misses, meters.hits), (0, 0), "{name}: nothing is asked of the store");
        assert_eq!((counts.submits, counts.waits), (1, 1), "{name}: {counts:?}");
        for memory in [ExpertMemory::Percent(30.0), least(&model, &on_gpu)] {
            let streamed = on_gpu.clone().expert_memory(memory);
            for streamed in [streamed.clone().prefetch(false), streamed] {
                let (ours, meters, _) = answer(&model, &streamed, &gpu);
                assert_same_bits(&ours, &expected, &format!("{name}, {precision:?}, {memory:?}"));
                assert!(meters.misses > 0 && meters.bytes_lifted == 0, "{name}, {memory:?}: {meters:?}");
                assert_eq!(gpu.counts().uploaded, 0, "{name}, {memory:?}");
            }
        }
    }
}

#[test]
fn residency_changes_no_bit_of_the_best() {
    run::<Best>(residency_changes_no_bit::<Best>);
}

#[test]
fn residency_changes_no_bit_of_the_plain() {
    run::<Plain>(residency_changes_no_bit::<Plain>);
}
