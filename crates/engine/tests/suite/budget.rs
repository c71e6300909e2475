//! Budgets that are too small.

use forebay_engine::{Engine, Error, Options};

use crate::common::models::demo_model;
use crate::common::slots::machine;

#[test]
fn a_budget_that_is_too_small_is_refused_with_the_bytes_it_needs() {
    let open = |memory| {
        let options = Options::default().memory(memory).machine(machine());
        Engine::open(&demo_model(), &options)
    };
    match open(1 << 20).map(drop) {
        Err(error @ Error::Budget { need, have, .. }) => {
            assert_eq!(have, 1 << 20);
            let message = error.to_string();
            assert!(message.contains("Options::memory") && message.contains("dense weights"), "{message}");
            // Slightly less than the reported need is refused; exactly that works.
            assert!(open(need - (1 << 20)).is_err());
            let engine = open(need).unwrap();
            assert!(engine.plan().total() <= engine.plan().budget);
        }
        other => panic!("{other:?}"),
    }
}
