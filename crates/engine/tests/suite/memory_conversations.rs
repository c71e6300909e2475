//! Memory of conversations is counted.

use forebay_engine::{Error, Options, Purpose};
use forebay_testing::assert_same_bits;

use crate::common::models::random_tokens;
use crate::common::slots::engine_with_slots;

#[test]
fn conversations_share_the_budget_with_experts() {
    conversations_beyond_the_plan_borrow_expert_slots();
    a_conversation_without_memory_is_refused_and_others_continue();
    forks_take_memory_only_for_unshared_pages();
}

#[test]
fn the_ledger_says_what_memory_is_used_for() {
    let engine = engine_with_slots(8 << 20, Options::default());
    let plan = engine.plan();
    let held = |purpose| engine.memory().iter().find(|entry| entry.purpose == purpose).unwrap().bytes;
    let total = || engine.memory().iter().map(|entry| entry.bytes).sum::<u64>();
    assert_eq!((held(Purpose::Dense), held(Purpose::Experts)), (plan.dense, plan.slot_bytes));
    assert_eq!(total(), plan.total() - plan.kv, "no memory is held yet");

    let tokens = random_tokens(1000, 4096, 15);
    let mut sessions = [engine.session(), engine.session()];
    for session in &mut sessions {
        session.extend(&tokens).unwrap();
    }
    let needed = 2000 * engine.traffic().position;
    assert!(held(Purpose::Conversations) >= needed, "{} bytes for {needed}", held(Purpose::Conversations));
    assert!(held(Purpose::Experts) < plan.slot_bytes, "slots lend what the plan has not reserved");
    assert!(total() <= plan.budget, "{} bytes of {}", total(), plan.budget);

    let mut request = engine.hold_for_requests();
    request.resize(1 << 20).unwrap();
    assert_eq!(held(Purpose::Requests), 1 << 20);
    assert!(total() <= plan.budget);
    drop((sessions, request));
    assert_eq!(total(), plan.total() - plan.kv, "all memory was returned");
}

/// The plan reserves memory for one conversation. Others borrow from expert slots, and return it.
fn conversations_beyond_the_plan_borrow_expert_slots() {
    let engine = engine_with_slots(8 << 20, Options::default());
    let planned = engine.plan().slot_bytes;
    let tokens = random_tokens(1000, 4096, 15);
    let mut first = engine.session();
    first.extend(&tokens).unwrap();
    assert_eq!(engine.slot_bytes(), planned, "the plan reserves memory for this");

    let mut second = engine.session();
    second.extend(&tokens).unwrap();
    let taken = planned - engine.slot_bytes();
    // First the memory is used that is too small for another slot of each class.
    let unused = engine.plan().budget - engine.plan().total();
    let needed = 1000 * engine.traffic().position;
    assert!(taken + unused >= needed, "{taken} bytes taken and {unused} unused for {needed}");
    assert_same_bits(first.logits(), second.logits(), "conversations that took memory from each other");

    let mut third = engine.session();
    third.extend(&tokens[..1]).unwrap();
    drop(second);
    drop(first);
    assert_eq!(engine.slot_bytes(), planned, "the rest fits the plan");
    third.extend(&tokens).unwrap();
}

fn a_conversation_without_memory_is_refused_and_others_continue() {
    let engine = engine_with_slots(2 << 20, Options::default());
    let tokens = random_tokens(1000, 4096, 16);
    let mut first = engine.session();
    first.extend(&tokens[..900]).unwrap();
    let mut second = engine.session();
    match second.extend(&tokens) {
        Err(error @ Error::Budget { need, have, .. }) => {
            assert!(need > have && error.to_string().contains("Options::memory"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(engine.slot_bytes(), engine.plan().slot_bytes, "a refused conversation borrows nothing");
    first.extend(&tokens).unwrap();
    drop(first);
    second.extend(&tokens).unwrap();
}

fn forks_take_memory_only_for_unshared_pages() {
    let engine = engine_with_slots(8 << 20, Options::default());
    let planned = engine.plan().slot_bytes;
    let tokens = random_tokens(1000, 4096, 17);
    let mut first = engine.session();
    first.extend(&tokens).unwrap();
    // Each fork has one unshared page; eight copies would need eight thousand positions.
    let mut forks: Vec<_> = (0..8).map(|_| first.fork().unwrap()).collect();
    for (i, fork) in forks.iter_mut().enumerate() {
        fork.push(tokens[i]).unwrap();
    }
    let taken = planned - engine.slot_bytes();
    let pages = 8 * 64 * engine.traffic().position;
    assert!(taken > 0 && taken <= 2 * pages, "{taken} bytes for {pages} of pages");
    // Shared pages count as long as one conversation has them.
    drop(first);
    let mut another = engine.session();
    another.extend(&tokens[..1000]).unwrap();
    assert!(engine.slot_bytes() + 1000 * engine.traffic().position <= planned);
    forks[0].extend(&tokens[..10]).unwrap();
    drop(forks.split_off(1));
    drop(another);
    assert_eq!(engine.slot_bytes(), planned, "the rest fits the plan");
}
