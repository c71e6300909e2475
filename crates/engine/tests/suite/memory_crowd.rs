//! Requests that do not fit into memory beside others wait, and lose nothing.

use forebay_engine::{
    Answer, Cancel, Crowd, CrowdOptions, Engine, Error, Grammar, Options, PrefixOptions, Request, Result,
};
use serde_json::json;

use crate::common::models::random_tokens;
use crate::common::served::{Ear, add, alone, ask, assert_same, finish, request};
use crate::common::slots::engine_with_slots;

#[test]
fn memory_that_does_not_suffice_for_all_delays_and_changes_nothing() {
    let engine = engine_with_slots(2 << 20, Options::default().chunk(64));
    the_last_ones_give_way(&engine);
    who_waits_for_a_prompt_that_gives_way_is_answered(&engine);
    what_is_kept_gives_way_first(&engine);
    who_finds_no_room_alone_is_told(&engine);
    let engine = engine_with_slots(6 << 20, Options::default().chunk(64));
    grammars_that_grow_wait_for_each_other(&engine);
    who_is_alone_waits_for_what_requests_hold(&engine);
}

fn the_last_ones_give_way(engine: &Engine) {
    // The first two grow until they do not fit together; the third does not fit from the start.
    let requests = [(300, 400), (300, 390), (700, 20)]
        .map(|(tokens, most)| request(&random_tokens(tokens, 4096, 40 + most as u64), most, 1));
    let expected = requests.each_ref().map(|request| alone(engine, request));
    let mut crowd = Crowd::new(engine, CrowdOptions::new(4));
    let ears = requests.each_ref().map(|request| add(&mut crowd, request));
    let ended = || ears.iter().filter(|ear| ear.has_ended()).count();
    let (mut most, mut gave_way, mut while_writing) = (0, 0, 0);
    while !crowd.is_empty() {
        let before = crowd.running() + ended();
        crowd.step(&Cancel::default()).unwrap();
        most = most.max(crowd.running());
        if crowd.running() + ended() < before {
            gave_way += 1;
            while_writing += usize::from(!ears[1].text().is_empty() && !ears[1].has_ended());
        }
    }
    assert!(
        most >= 2 && while_writing >= 1,
        "{most} at once; {gave_way} gave way, {while_writing} of them writing"
    );
    for (ear, expected) in ears.iter().zip(&expected) {
        let progress = ear.progress();
        assert!(progress.windows(2).all(|pair| pair[0] < pair[1]), "{progress:?}");
        assert_same(&ear.answer(), expected, "with little memory");
    }
}

/// Two requests wait for the same prompt, which in turn must give its memory to an older request.
fn who_waits_for_a_prompt_that_gives_way_is_answered(engine: &Engine) {
    let shared = random_tokens(900, 4096, 70);
    let old = request(&random_tokens(800, 4096, 71), 20, 1);
    let leads = request(&[&shared[..], &random_tokens(40, 4096, 72)].concat(), 5, 2);
    let twin = request(&[&shared[..], &random_tokens(60, 4096, 73)].concat(), 5, 3);
    let requests = [&old, &leads, &twin, &twin];
    let mut crowd = Crowd::new(engine, CrowdOptions::new(4));
    let ears = requests.map(|request| add(&mut crowd, request));
    crowd.step(&Cancel::default()).unwrap();
    assert_eq!((crowd.running(), ears[2].progress()), (4, Vec::new()), "the twins wait for the third");
    let mut gave_way = false;
    while ears[2].progress().is_empty() && !crowd.is_empty() {
        crowd.step(&Cancel::default()).unwrap();
        gave_way |= crowd.waiting() > 0;
        assert_eq!(crowd.idle_steps(), 0, "they wait for each other");
    }
    assert!(gave_way, "memory sufficed for all");
    finish(&mut crowd);
    for (request, ear) in requests.into_iter().zip(&ears) {
        assert_same(&ear.answer(), &alone(engine, request), "after a request gave way");
    }
}

fn what_is_kept_gives_way_first(engine: &Engine) {
    let requests: Vec<Request> = (0..4).map(|i| request(&random_tokens(500, 4096, 50 + i), 5, i)).collect();
    let expected: Vec<Answer> = requests.iter().map(|request| alone(engine, request)).collect();
    let prefixes = PrefixOptions { memory: 1 << 40, ..PrefixOptions::new(engine, None) };
    let mut crowd = Crowd::new(engine, CrowdOptions { prefixes: Some(prefixes), ..CrowdOptions::new(4) });
    for (request, expected) in requests.iter().zip(&expected) {
        assert_same(&ask(&mut crowd, request), expected, "one after another");
    }
    let meters = crowd.prefix_meters();
    assert!(meters.evictions > 0 && meters.entries > 0 && meters.entries < 4, "{meters:?}");
}

fn who_finds_no_room_alone_is_told(engine: &Engine) {
    let slots = engine.slot_bytes();
    let mut crowd = Crowd::new(engine, CrowdOptions::new(4));
    let fits = request(&random_tokens(300, 4096, 60), 10, 1);
    // Another holder has the memory.
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
    assert_eq!(engine.slot_bytes(), slots, "all memory was returned");
}

/// A request whose answer follows a grammar, with its own grammar states.
fn by_schema(engine: &Engine, i: u64) -> Result<Request> {
    let field =
        |n: u64| (format!("f{i}{n}"), json!({ "type": "string", "pattern": "^([a-z]{1,9} ?){3,9}$" }));
    let fields: serde_json::Map<_, _> = (0..3).map(field).collect();
    let schema =
        json!({ "type": "object", "required": fields.keys().collect::<Vec<_>>(), "properties": fields });
    let grammar = Grammar::json_schema(engine, &schema)?;
    Ok(request(&random_tokens(100, 4096, 80 + i), 40, i).grammar(Some(grammar)))
}

/// Requests that wait hold their grammars. However many wait, memory is left to answer them.
fn grammars_that_grow_wait_for_each_other(engine: &Engine) {
    let mut requests: Vec<Request> = Vec::new();
    let refusal = loop {
        match by_schema(engine, requests.len() as u64) {
            Ok(request) => requests.push(request),
            Err(error) => break error,
        }
    };
    assert!(matches!(refusal, Error::Budget { .. }) && requests.len() > 2, "{refusal}");
    let expected: Vec<Answer> = requests.iter().map(|request| alone(engine, request)).collect();
    let mut crowd = Crowd::new(engine, CrowdOptions::new(16));
    let ears: Vec<Ear> = requests.iter().chain(&requests).map(|request| add(&mut crowd, request)).collect();
    let ended = || ears.iter().filter(|ear| ear.has_ended()).count();
    let (mut most, mut gave_way) = (0, 0);
    while !crowd.is_empty() {
        let before = crowd.running() + ended();
        crowd.step(&Cancel::default()).unwrap();
        most = most.max(crowd.running());
        gave_way += usize::from(crowd.running() + ended() < before);
    }
    assert!(most >= 2 && most < ears.len() && gave_way > 0, "{most} at once, {gave_way} gave way");
    for (ear, expected) in ears.iter().zip(expected.iter().chain(&expected)) {
        assert_same(&ear.answer(), expected, "with little memory for grammars");
    }
}

fn who_is_alone_waits_for_what_requests_hold(engine: &Engine) {
    let request = request(&random_tokens(300, 4096, 90), 10, 1);
    let expected = alone(engine, &request);
    let mut crowd = Crowd::new(engine, CrowdOptions::new(4));
    // A request that is not being answered yet.
    let mut other = engine.hold_for_requests();
    let mut bytes = 64 << 20;
    while other.resize(bytes).is_err() {
        bytes -= 64 << 10;
    }
    let ear = add(&mut crowd, &request);
    let before = crowd.idle_steps();
    for _ in 0..3 {
        crowd.step(&Cancel::default()).unwrap();
    }
    assert!(!ear.has_ended() && crowd.idle_steps() > before, "it waits");
    drop(other);
    finish(&mut crowd);
    assert_same(&ear.answer(), &expected, "when the other had its memory no longer");
}
