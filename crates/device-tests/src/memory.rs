//! A device's memory: planned, allowed and used.

use forebay_engine::internals::experts::Device;
use forebay_engine::{Cancel, Engine, Precision, Turn};

use crate::device::{CountingDevice, TestDevice, Use, open, with};
use crate::models::{KEEPING, containers, random_tokens};

/// The device allocates what was planned, and a budget of exactly that suffices.
pub fn the_plan_is_kept<D: CountingDevice>() {
    for family in KEEPING {
        let [file, _] = containers(family);
        let open_on = |memory| {
            let device = open::<D>(memory);
            (Engine::open(&file, &with(device.clone(), Precision::Fast)).unwrap(), device)
        };
        let (engine, _) = open_on(None);
        let planned = engine.plan().device.clone().unwrap();
        drop(engine);
        // Exactly as much as planned.
        let (engine, device) = open_on(Some(planned.total()));
        let used = |purposes: &[Use]| -> u64 {
            D::used(&device).iter().filter(|(what, _)| purposes.contains(what)).map(|(_, bytes)| bytes).sum()
        };
        let (weights, expected) = (used(&[Use::Dense, Use::Experts]), planned.dense + planned.slot_bytes);
        assert!(weights >= expected, "{family}: {weights} of {expected}");
        // A little more than planned, because each plane of a matrix is followed by a few unused bytes.
        assert!(weights <= expected + (1 << 20), "{family}: {weights} of {expected}");
        let tokens = random_tokens(engine.context().min(300), 50, 3);
        let mut session = engine.session();
        session.extend(&tokens[..tokens.len() - 5]).unwrap();
        for &token in &tokens[tokens.len() - 5..] {
            let mut turns = [Turn { session: &mut session, tokens: &[token], logits: true, marks: &[] }];
            let mut step = engine.step(&mut turns, &Cancel::default()).unwrap();
            step.next_row().unwrap().unwrap().1.best().unwrap();
            step.finish().unwrap();
        }
        let scratch = used(&[Use::Scratch]);
        assert!(scratch > 0 && scratch <= planned.scratch, "{family}: {scratch} of {}", planned.scratch);
        let all: u64 = D::used(&device).iter().map(|(_, bytes)| bytes).sum();
        println!("{family}: {all} of {}: {:?}", planned.total(), D::used(&device));
        assert!(all <= planned.total());
        // All of it is returned.
        drop((session, engine));
        assert_eq!(used(&[Use::Dense, Use::Experts, Use::Scratch]), 0);
    }
}

/// A budget is limited to the memory that is free.
pub fn a_budget_is_no_more_than_is_free<D: TestDevice>() {
    let all = open::<D>(None).memory();
    assert_eq!(open::<D>(Some(1 << 20)).memory(), 1 << 20);
    let asked = open::<D>(Some(1 << 50)).memory();
    // Other tests use some at the same time.
    assert!(asked < 1 << 50 && asked > all / 2, "{asked} of {all}");
}
