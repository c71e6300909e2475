//! Those who find no room beside others wait, and lose nothing. A test program of its own with one test, because a plan starts
//! from what the process has resident, and other tests would change that meanwhile.

#[path = "common/models.rs"]
mod common;
#[path = "common/served.rs"]
mod served;

use common::{demo_model, random_tokens};
use forebay_engine::{
    Answer, Cancel, Crowd, CrowdOptions, Engine, Error, Options, PrefixOptions, Prospect, Request,
};
use served::{Ear, add, alone, ask, assert_same, finish, request};

#[test]
fn memory_that_does_not_suffice_for_all_delays_and_changes_nothing() {
    let engine = Engine::open(&demo_model(), &memory_for_slots(2 << 20)).unwrap();
    the_last_ones_give_way(&engine);
    what_is_kept_gives_way_first(&engine);
    who_finds_no_room_alone_is_told(&engine);
}

fn the_last_ones_give_way(engine: &Engine) {
    let requests: Vec<Request> = (0..4).map(|i| request(&random_tokens(500, 4096, 40 + i), 120, i)).collect();
    let expected: Vec<Answer> = requests.iter().map(|request| alone(engine, request)).collect();
    let mut crowd = Crowd::new(engine, CrowdOptions::new(4));
    let ears: Vec<Ear> = requests.iter().map(|request| add(&mut crowd, request)).collect();
    let mut most = 0;
    let mut gave_way = 0;
    while !crowd.is_empty() {
        let before = crowd.running();
        crowd.step(&Cancel::default()).unwrap();
        most = most.max(crowd.running());
        gave_way +=
            before.saturating_sub(crowd.running() + ears.iter().filter(|ear| ear.has_ended()).count());
    }
    assert!(most >= 1 && gave_way >= 1, "{most} at once; {gave_way} gave way");
    for (ear, expected) in ears.iter().zip(&expected) {
        let progress = ear.progress();
        assert!(progress.windows(2).all(|pair| pair[0] < pair[1]), "{progress:?}");
        assert_same(&ear.answer(), expected, "with little memory");
    }
}

fn what_is_kept_gives_way_first(engine: &Engine) {
    let requests: Vec<Request> = (0..6).map(|i| request(&random_tokens(500, 4096, 50 + i), 20, i)).collect();
    let expected: Vec<Answer> = requests.iter().map(|request| alone(engine, request)).collect();
    let prefixes = PrefixOptions { memory: 1 << 40, ..PrefixOptions::new(engine, None) };
    let mut crowd = Crowd::new(engine, CrowdOptions { prefixes: Some(prefixes), ..CrowdOptions::new(4) });
    for (request, expected) in requests.iter().zip(&expected) {
        assert_same(&ask(&mut crowd, request), expected, "one after another");
    }
    let meters = crowd.prefix_meters();
    assert!(meters.evictions > 0 && meters.entries > 0 && meters.entries < 6, "{meters:?}");
}

fn who_finds_no_room_alone_is_told(engine: &Engine) {
    let slots = engine.slot_bytes();
    let mut crowd = Crowd::new(engine, CrowdOptions::new(4));
    let fits = request(&random_tokens(300, 4096, 60), 10, 1);
    // Somebody else has the memory.
    let mut other = engine.session();
    other.extend(&random_tokens(1000, 4096, 61)).unwrap();
    let ears = [add(&mut crowd, &request(&random_tokens(1000, 4096, 62), 10, 1)), add(&mut crowd, &fits)];
    finish(&mut crowd);
    let error = ears[0].error();
    assert!(matches!(error, Error::Budget { .. }), "{error}");
    drop(other);
    let again = ask(&mut crowd, &fits);
    assert_same(&again, &alone(engine, &fits), "when there is memory");
    drop(crowd);
    assert_eq!(engine.slot_bytes(), slots, "all was given back");
}

/// Memory for the fixed part of the demo model and about so many bytes of slots.
fn memory_for_slots(bytes: u64) -> Options {
    let plan = Prospect::new(&demo_model(), &Options { memory: Some(1 << 40), ..Options::default() });
    let plan = plan.unwrap().plan().clone();
    // The room to move is larger where the budget is.
    let memory = plan.total() - plan.slot_bytes - (256 << 20) + (16 << 20) + bytes;
    Options { memory: Some(memory), chunk: Some(plan.chunk), ..Options::default() }
}
