//! Calls of the driver that fail, and a GPU that is lost.

use std::sync::Arc;

use forebay_cuda::Cuda;
use forebay_engine::experts::Device;
use forebay_engine::{Engine, Error, Options, Precision, TokenId};
use forebay_testing::assert_same_bits;

use crate::common::emulator::{Emulator, emulator};
use crate::common::models::{containers, logits, options, random_tokens};

fn gpu(memory: Option<u64>) -> Arc<Cuda> {
    Arc::new(Cuda::open(0, memory).unwrap())
}

fn on(device: &Arc<Cuda>) -> Options {
    Options { device: Some(device.clone()), ..options(Precision::Fast) }
}

fn model() -> std::path::PathBuf {
    containers("qwen35moe")[0].clone()
}

fn tokens() -> Vec<TokenId> {
    random_tokens(20, 50, 1)
}

/// Opens the model and asks it for an answer.
fn answer(options: &Options) -> Result<Vec<f32>, Error> {
    let engine = Engine::open(&model(), options)?;
    let mut session = engine.session();
    session.extend(&tokens())?;
    for id in 0..4 {
        session.push(TokenId(id))?;
    }
    Ok(session.logits().to_vec())
}

/// Lets the calls of a kind fail, each once, until there are no more of them. Every failure is told, in these words, and
/// nothing is the worse for it.
fn each_fails(emulator: &Emulator, kind: &str, words: &[&str]) {
    let device = gpu(None);
    let truth = answer(&on(&device)).unwrap();
    let free = gpu(None).memory();
    let (mut after, mut failures, mut successes) = (1, 0, 0);
    // One that fails may be made up for, but no two in a row are.
    while successes < 2 {
        emulator.fail(kind, after);
        match answer(&on(&device)) {
            Ok(_) => successes += 1,
            Err(error) => {
                let error = error.to_string();
                assert!(words.iter().all(|word| error.contains(word)), "{kind} {after}: {error}");
                (failures, successes) = (failures + 1, 0);
            }
        }
        emulator.repair();
        // The first ones all, then fewer.
        after += 1 + after / 8;
    }
    println!("{kind}: {failures} failures, the last before number {after}");
    assert!(failures > 3, "{kind}: {failures} failed");
    assert_same_bits(&answer(&on(&device)).unwrap(), &truth, kind);
    drop(device);
    let left = gpu(None).memory();
    assert!(left >= free, "{kind}: {free} bytes were free before, {left} after");
}

#[test]
fn memory_that_is_not_there_is_an_error() {
    let Some(emulator) = emulator() else { return };
    each_fails(&emulator, "allocation", &["out of memory", "memory limit", "Options::device = None"]);
}

#[test]
fn a_copy_that_fails_is_an_error() {
    let Some(emulator) = emulator() else { return };
    each_fails(&emulator, "copy", &["the GPU cannot", "Options::device = None"]);
}

#[test]
fn a_start_that_fails_is_an_error() {
    let Some(emulator) = emulator() else { return };
    each_fails(
        &emulator,
        "launch",
        &["the GPU cannot compute", "too many resources", "Options::device = None"],
    );
}

#[test]
fn pinned_memory_that_is_not_there_is_an_error() {
    let Some(emulator) = emulator() else { return };
    emulator.fail("pinned", 1);
    let error = answer(&on(&gpu(None))).unwrap_err().to_string();
    assert!(error.contains("pin memory") && error.contains("Options::device = None"), "{error}");
    answer(&on(&gpu(None))).unwrap();
}

#[test]
fn kernels_that_do_not_compile_are_named() {
    let Some(emulator) = emulator() else { return };
    let device = gpu(None);
    answer(&on(&device)).unwrap();
    // What is in the cache is not taken, and so compiled.
    emulator.fail("module", 3);
    emulator.fail("compile", 1);
    let error = answer(&on(&device)).unwrap_err().to_string();
    let named = |error: &str| {
        let (_, rest) = error.split_once("kernels (")?;
        let (name, rest) = rest.split_once(") cannot be compiled for sm_90")?;
        Some(rest.contains(&format!("{name}.cu(1): error")) && rest.contains("Options::device = None"))
    };
    assert_eq!(named(&error), Some(true), "{error}");
    answer(&on(&device)).unwrap();
}

/// In the middle of an answer, wherever that is.
#[test]
fn a_lost_gpu_is_an_error_and_the_processor_goes_on() {
    let Some(emulator) = emulator() else { return };
    let processor = options(Precision::Fast);
    let truth = logits(&model(), &processor, &tokens());
    for after in [1, 10, 100, 200] {
        let device = gpu(None);
        let engine = Engine::open(&model(), &on(&device)).unwrap();
        let mut session = engine.session();
        session.extend(&tokens()).unwrap();
        emulator.fail("lost", after);
        let error = (0..50).find_map(|id| session.push(TokenId(id)).err()).expect("it is lost").to_string();
        for words in ["the GPU cannot", "CUDA_ERROR_LAUNCH_FAILED", "Options::device = None"] {
            assert!(error.contains(words), "{words} is not in: {error}");
        }
        // It stays lost.
        session.push(TokenId(1)).unwrap_err();
        engine.session().extend(&tokens()).unwrap_err();
        assert!(Engine::open(&model(), &on(&device)).is_err());
        assert!(Cuda::open(0, None).is_err());
        assert_same_bits(&logits(&model(), &processor, &tokens()), &truth, "the processor");
        drop((session, engine, device));
        emulator.repair();
    }
    answer(&on(&gpu(None))).unwrap();
}

/// Weights, buffers and conversations: none of them beyond what was allowed.
#[test]
fn the_budget_holds() {
    let Some(emulator) = emulator() else { return };
    let before = emulator.in_use();
    answer(&on(&gpu(None))).unwrap();
    let need = emulator.peak() - before;
    let budget = need + (8 << 20);
    let engine = Engine::open(&model(), &on(&gpu(Some(budget)))).unwrap();
    let mut sessions = Vec::new();
    let error = loop {
        let mut session = engine.session();
        match session.extend(&tokens()) {
            Ok(_) => sessions.push(session),
            Err(error) => break error.to_string(),
        }
        assert!(sessions.len() < 10_000, "{budget} bytes hold no such number of conversations");
    };
    assert!(error.contains("memory limit"), "{error}");
    assert!(emulator.peak() - before <= budget);
    // Those that have their memory go on, and one that ends makes room for another.
    sessions[0].push(TokenId(1)).unwrap();
    sessions.pop();
    engine.session().extend(&tokens()).unwrap();
    assert!(emulator.peak() - before <= budget);
}
