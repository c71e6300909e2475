//! Driver calls that fail, and a device that is lost.

use std::path::PathBuf;
use std::sync::Arc;

use forebay_engine::internals::experts::Device;
use forebay_engine::{Engine, Error, Options, Precision, TokenId};
use forebay_testing::assert_same_bits;

use crate::device::{Fault, Faults, FaultyDevice, MEMORY_LIMIT, WITHOUT, open, with};
use crate::models::{containers, logits, options, random_tokens};
use crate::rooms::need;

fn on(device: &Arc<impl Device + 'static>) -> Options {
    with(device.clone(), Precision::Fast)
}

fn model() -> PathBuf {
    containers("qwen35moe")[0].clone()
}

fn tokens() -> Vec<TokenId> {
    random_tokens(20, 50, 1)
}

/// Opens a small model with these options and generates an answer.
///
/// # Errors
/// If anything fails.
pub fn answer(options: &Options) -> Result<Vec<f32>, Error> {
    let engine = Engine::open(&model(), options)?;
    let mut session = engine.session();
    session.extend(&tokens())?;
    for id in 0..4 {
        session.push(TokenId(id))?;
    }
    Ok(session.logits().to_vec())
}

/// Makes each call of this kind fail in turn, until there are no more. Every failure must be reported, with these words
/// and the device's, and must do no lasting harm.
fn each_fails<D: FaultyDevice>(faults: &D::Faults, fault: Fault, words: &[&str]) {
    let words = [D::words(fault), words].concat();
    let device = open::<D>(None);
    let truth = answer(&on(&device)).unwrap();
    let free = open::<D>(None).memory();
    let (mut after, mut failures, mut successes) = (1, 0, 0);
    // Some failures are compensated, but never two in a row.
    while successes < 2 {
        faults.fail(fault, after);
        match answer(&on(&device)) {
            Ok(_) => successes += 1,
            Err(error) => {
                let error = error.to_string();
                assert!(words.iter().all(|word| error.contains(word)), "{fault:?} {after}: {error}");
                (failures, successes) = (failures + 1, 0);
            }
        }
        faults.repair();
        // Tests all early calls, then fewer.
        after += 1 + after / 8;
    }
    println!("{fault:?}: {failures} failures, the last before number {after}");
    assert!(failures > 3, "{fault:?}: {failures} failed");
    assert_same_bits(&answer(&on(&device)).unwrap(), &truth, &format!("after {fault:?}"));
    drop(device);
    let left = open::<D>(None).memory();
    assert!(left >= free, "{fault:?}: {free} bytes were free before, {left} after");
}

pub fn memory_that_is_not_there_is_an_error<D: FaultyDevice>(faults: &D::Faults) {
    each_fails::<D>(faults, Fault::Allocation, &[MEMORY_LIMIT, WITHOUT]);
}

pub fn a_copy_that_fails_is_an_error<D: FaultyDevice>(faults: &D::Faults) {
    each_fails::<D>(faults, Fault::Copy, &[WITHOUT]);
}

pub fn a_start_that_fails_is_an_error<D: FaultyDevice>(faults: &D::Faults) {
    each_fails::<D>(faults, Fault::Launch, &[WITHOUT]);
}

/// Loses the device in the middle of an answer.
pub fn a_lost_device_is_an_error_and_the_processor_goes_on<D: FaultyDevice>(faults: &D::Faults) {
    let processor = options(Precision::Fast);
    let truth = logits(&model(), &processor, &tokens());
    for after in [1, 10, 100, 200] {
        let device = open::<D>(None);
        let engine = Engine::open(&model(), &on(&device)).unwrap();
        let mut session = engine.session();
        session.extend(&tokens()).unwrap();
        faults.fail(Fault::Lost, after);
        let error = (0..50).find_map(|id| session.push(TokenId(id)).err()).expect("it is lost").to_string();
        for word in [D::words(Fault::Lost), &[WITHOUT]].concat() {
            assert!(error.contains(word), "{word} is not in: {error}");
        }
        // The device stays lost.
        session.push(TokenId(1)).unwrap_err();
        engine.session().extend(&tokens()).unwrap_err();
        assert!(Engine::open(&model(), &on(&device)).is_err());
        assert!(D::open(None).is_err());
        assert_same_bits(&logits(&model(), &processor, &tokens()), &truth, "the processor");
        drop((session, engine, device));
        faults.repair();
    }
    answer(&on(&open::<D>(None))).unwrap();
}

/// Weights, buffers and conversations together stay within the allowed memory.
pub fn the_budget_holds<D: FaultyDevice>(faults: &D::Faults) {
    let before = faults.in_use();
    answer(&on(&open::<D>(None))).unwrap();
    let one = faults.peak() - before;
    let budget = need(&model(), &on(&open::<D>(Some(1)))) + (8 << 20);
    let engine = Engine::open(&model(), &on(&open::<D>(Some(budget)))).unwrap();
    // A part of the budget is for the driver itself, which the device does not count and conversations cannot use.
    let most = budget.min(one + engine.plan().device.as_ref().unwrap().room());
    let mut sessions = Vec::new();
    let error = loop {
        let mut session = engine.session();
        match session.extend(&tokens()) {
            Ok(_) => sessions.push(session),
            Err(error) => break error.to_string(),
        }
        assert!(sessions.len() < 10_000, "{budget} bytes hold no such number of conversations");
    };
    assert!(error.contains(MEMORY_LIMIT), "{error}");
    assert!(faults.peak() - before <= most);
    // Conversations that have their memory continue, and one that ends frees memory for another.
    sessions[0].push(TokenId(1)).unwrap();
    sessions.pop();
    engine.session().extend(&tokens()).unwrap();
    assert!(faults.peak() - before <= most);
}
