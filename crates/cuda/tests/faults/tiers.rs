//! What fails while experts move between the drive, the computer's memory and the GPU's.

use forebay_engine::{Engine, Error, Precision};
use forebay_testing::assert_same_bits;

use crate::common::emulator::emulator;
use crate::common::models::{data, demo_model, options};
use crate::common::tiers::{Room, answer, tiers};

/// A copy or a kernel that fails ends the answer. The next one is right, since what was on its way does not count as arrived; where
/// the failure was one after which a device is not to be used again, that is the next engine's.
#[test]
fn what_fails_on_its_way_is_brought_again() {
    let Some(emulator) = emulator() else { return };
    let model = data("golden/qwen3moe.gguf");
    let options = tiers(&model, Precision::Fast, Room::Percent(30), Room::Percent(50));
    let truth = answer(&Engine::open(&model, &options).unwrap()).unwrap();
    let (mut lost, mut failed) = (0, 0);
    for kind in ["copy", "launch"] {
        for after in (1..200).step_by(11) {
            let mut engine = Engine::open(&model, &options).unwrap();
            emulator.fail(kind, after);
            let outcome = answer(&engine);
            emulator.repair();
            match outcome {
                Ok(ours) => assert_same_bits(&ours, &truth, "nothing failed"),
                Err(Error::DeviceLost(_)) => {
                    engine = Engine::open(&model, &options).unwrap();
                    lost += 1;
                }
                Err(error) => {
                    assert!(error.to_string().contains("the GPU cannot"), "{error}");
                    failed += 1;
                }
            }
            assert_same_bits(&answer(&engine).unwrap(), &truth, &format!("after {kind} {after} failed"));
        }
    }
    assert!(lost > 5 && failed > 5, "{lost} devices lost, {failed} failures");
}

#[test]
fn a_lost_device_ends_the_answer_and_the_processor_goes_on() {
    let Some(emulator) = emulator() else { return };
    let model = data("golden/qwen3moe.gguf");
    let on_gpu = tiers(&model, Precision::Fast, Room::Percent(30), Room::Percent(50));
    let engine = Engine::open(&model, &on_gpu).unwrap();
    emulator.fail("lost", 150);
    let error = answer(&engine).unwrap_err().to_string();
    assert!(error.contains("Options::device = None"), "{error}");
    answer(&Engine::open(&model, &options(Precision::Fast)).unwrap()).unwrap();
    drop(engine);
    emulator.repair();
    answer(&Engine::open(&model, &on_gpu).unwrap()).unwrap();
}

/// Others may take the GPU's memory after the plan was made.
#[test]
fn fewer_slots_than_planned_are_enough() {
    let Some(emulator) = emulator() else { return };
    let model = data("golden/qwen3moe.gguf");
    let options = tiers(&model, Precision::Fast, Room::Percent(60), Room::Percent(50));
    let engine = Engine::open(&model, &options).unwrap();
    let (truth, planned) = (answer(&engine).unwrap(), engine.plan().device.clone().unwrap());
    drop(engine);
    let (mut fewer, mut refused) = (0, 0);
    for after in 1..100 {
        emulator.fail("allocation", after);
        match Engine::open(&model, &options) {
            Err(error) => {
                assert!(error.to_string().contains("memory limit"), "{error}");
                refused += 1;
            }
            Ok(engine) => {
                emulator.repair();
                let there = engine.plan().device.as_ref().unwrap();
                fewer += usize::from(there.slot_count() < planned.slot_count());
                assert_eq!(there.room(), planned.room(), "what others have is not promised to conversations");
                assert_same_bits(&answer(&engine).unwrap(), &truth, &format!("allocation {after} failed"));
            }
        }
        emulator.repair();
    }
    assert!(fewer > 0 && refused > 0, "{fewer} times fewer slots, {refused} times none");
}

#[test]
fn both_budgets_hold() {
    let Some(emulator) = emulator() else { return };
    let model = demo_model();
    for room in [Room::Percent(30), Room::Least] {
        let options = tiers(&model, Precision::Fast, room, Room::Percent(30));
        let before = emulator.in_use();
        let engine = Engine::open(&model, &options).unwrap();
        answer(&engine).unwrap();
        let (peak, budget) = (emulator.peak() - before, engine.plan().device.as_ref().unwrap().budget);
        assert!(peak <= budget, "{room:?}: {peak} of {budget} bytes");
    }
}

/// The file loses its end while an answer is written, and gets it back.
#[test]
fn a_drive_that_fails_ends_the_answer_and_not_the_engine() {
    let Some(_emulator) = emulator() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shrinking.gguf");
    let whole = std::fs::read(data("golden/qwen3moe.gguf")).unwrap();
    std::fs::write(&path, &whole).unwrap();
    let options = tiers(&path, Precision::Fast, Room::Least, Room::Least);
    let engine = Engine::open(&path, &options).unwrap();
    let truth = answer(&engine).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(whole.len() as u64 / 4).unwrap();
    let error = answer(&engine).expect_err("most experts are gone").to_string();
    assert!(error.contains("shrinking.gguf"), "{error}");
    std::fs::write(&path, &whole).unwrap();
    assert_same_bits(&answer(&engine).unwrap(), &truth, "the file is whole again");
}
