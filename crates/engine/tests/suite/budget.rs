//! Budgets that are too small.

use forebay_engine::{Engine, Error, Options};

use crate::common::models::demo_model;
use crate::common::slots::machine;

#[test]
fn a_budget_that_cannot_work_is_refused_with_what_it_needs() {
    let open = |memory| {
        let options = Options::default().memory(memory).machine(machine());
        Engine::open(&demo_model(), &options)
    };
    match open(1 << 20).map(drop) {
        Err(error @ Error::Budget { need, have, .. }) => {
            assert_eq!(have, 1 << 20);
            let message = error.to_string();
            assert!(message.contains("Options::memory") && message.contains("dense weights"), "{message}");
            // The budget in the error suffices, and a slightly smaller one does not.
            assert!(open(need - (1 << 20)).is_err());
            let engine = open(need).unwrap();
            assert!(engine.plan().total() <= engine.plan().budget);
        }
        other => panic!("{other:?}"),
    }
}
