//! Budgets that cannot work.

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
            // With a little less than it says it does not work, and with that it does.
            assert!(open(need - (1 << 20)).is_err());
            let engine = open(need).unwrap();
            assert!(engine.plan().total() <= engine.plan().budget);
        }
        other => panic!("{other:?}"),
    }
}
