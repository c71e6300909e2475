//! Failures while experts move between the drive, RAM and the device.

use forebay_engine::{Engine, Error, Precision};
use forebay_testing::assert_same_bits;

use crate::device::{Fault, Faults, FaultyDevice, MEMORY_LIMIT, WITHOUT};
use crate::models::{data, demo_model, options};
use crate::rooms::{Room, answer, tiers};

/// A failed copy or kernel ends the answer. The next answer is right, because an interrupted upload does not count as
/// done. After a failure that makes a device unusable, a new engine gives the right answer.
pub fn what_fails_on_its_way_is_brought_again<D: FaultyDevice>(faults: &D::Faults) {
    let model = data("golden/qwen3moe.gguf");
    let options = tiers::<D>(&model, Precision::Fast, Room::Percent(30), Room::Percent(50));
    let truth = answer(&Engine::open(&model, &options).unwrap()).unwrap();
    let (mut lost, mut failed) = (0, 0);
    for fault in [Fault::Copy, Fault::Launch] {
        for after in (1..200).step_by(11) {
            let mut engine = Engine::open(&model, &options).unwrap();
            faults.fail(fault, after);
            let outcome = answer(&engine);
            faults.repair();
            match outcome {
                Ok(ours) => assert_same_bits(&ours, &truth, "nothing failed"),
                Err(Error::DeviceLost(_)) => {
                    engine = Engine::open(&model, &options).unwrap();
                    lost += 1;
                }
                Err(error) => {
                    let error = error.to_string();
                    assert!(D::words(fault).iter().all(|word| error.contains(word)), "{error}");
                    failed += 1;
                }
            }
            assert_same_bits(&answer(&engine).unwrap(), &truth, &format!("after {fault:?} {after} failed"));
        }
    }
    assert!(lost > 5 && failed > 5, "{lost} devices lost, {failed} failures");
}

pub fn a_lost_device_ends_the_answer_and_the_processor_goes_on<D: FaultyDevice>(faults: &D::Faults) {
    let model = data("golden/qwen3moe.gguf");
    let on_device = tiers::<D>(&model, Precision::Fast, Room::Percent(30), Room::Percent(50));
    let engine = Engine::open(&model, &on_device).unwrap();
    faults.fail(Fault::Lost, 150);
    let error = answer(&engine).unwrap_err().to_string();
    assert!(error.contains(WITHOUT), "{error}");
    answer(&Engine::open(&model, &options(Precision::Fast)).unwrap()).unwrap();
    drop(engine);
    faults.repair();
    answer(&Engine::open(&model, &on_device).unwrap()).unwrap();
}

/// Other programs may take the device's memory after the plan was made.
pub fn fewer_slots_than_planned_are_enough<D: FaultyDevice>(faults: &D::Faults) {
    let model = data("golden/qwen3moe.gguf");
    let options = tiers::<D>(&model, Precision::Fast, Room::Percent(60), Room::Percent(50));
    let engine = Engine::open(&model, &options).unwrap();
    let (truth, planned) = (answer(&engine).unwrap(), engine.plan().device.clone().unwrap());
    drop(engine);
    let (mut fewer, mut refused) = (0, 0);
    for after in 1..100 {
        faults.fail(Fault::Allocation, after);
        match Engine::open(&model, &options) {
            Err(error) => {
                assert!(error.to_string().contains(MEMORY_LIMIT), "{error}");
                refused += 1;
            }
            Ok(engine) => {
                faults.repair();
                let there = engine.plan().device.as_ref().unwrap();
                fewer += usize::from(there.slot_count() < planned.slot_count());
                assert_eq!(there.room(), planned.room(), "what others have is not promised to conversations");
                assert_same_bits(&answer(&engine).unwrap(), &truth, &format!("allocation {after} failed"));
            }
        }
        faults.repair();
    }
    assert!(fewer > 0 && refused > 0, "{fewer} times fewer slots, {refused} times none");
}

pub fn both_budgets_hold<D: FaultyDevice>(faults: &D::Faults) {
    let model = demo_model();
    for room in [Room::Percent(30), Room::Least] {
        let options = tiers::<D>(&model, Precision::Fast, room, Room::Percent(30));
        let before = faults.in_use();
        let engine = Engine::open(&model, &options).unwrap();
        answer(&engine).unwrap();
        let (peak, budget) = (faults.peak() - before, engine.plan().device.as_ref().unwrap().budget);
        assert!(peak <= budget, "{room:?}: {peak} of {budget} bytes");
    }
}

/// The file is truncated during an answer, and restored later.
pub fn a_drive_that_fails_ends_the_answer_and_not_the_engine<D: FaultyDevice>(_: &D::Faults) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shrinking.gguf");
    let whole = std::fs::read(data("golden/qwen3moe.gguf")).unwrap();
    std::fs::write(&path, &whole).unwrap();
    let options = tiers::<D>(&path, Precision::Fast, Room::Least, Room::Least);
    let engine = Engine::open(&path, &options).unwrap();
    let truth = answer(&engine).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(whole.len() as u64 / 4).unwrap();
    let error = answer(&engine).expect_err("most experts are gone").to_string();
    assert!(error.contains("shrinking.gguf"), "{error}");
    std::fs::write(&path, &whole).unwrap();
    assert_same_bits(&answer(&engine).unwrap(), &truth, "the file is whole again");
}
