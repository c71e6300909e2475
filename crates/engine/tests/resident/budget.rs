//! Budgets that cannot work.

use forebay_engine::{Engine, Error, Options};

use crate::common::models::demo_model;
use crate::one_at_a_time;

#[test]
fn a_budget_that_cannot_work_is_refused_with_what_it_needs() {
    let _turn = one_at_a_time();
    let open = |memory| Engine::open(&demo_model(), &Options { memory: Some(memory), ..Options::default() });
    match open(1 << 20).map(drop) {
        Err(error @ Error::Budget { need, have, .. }) => {
            assert_eq!(have, 1 << 20);
            let message = error.to_string();
            assert!(message.contains("--memory") && message.contains("dense weights"), "{message}");
            // With what it says, or a little more since the process has grown, it works.
            let engine = open(need + (32 << 20)).unwrap();
            assert!(engine.plan().total() <= engine.plan().budget);
        }
        other => panic!("{other:?}"),
    }
}
