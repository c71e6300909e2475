//! Conversations on a device: computed together, forked, saved, loaded, and rewound.

use std::sync::atomic::{AtomicBool, Ordering};

use forebay_engine::{Cancel, Engine, Precision, Session, Stage, TokenId, Turn};
use forebay_testing::{assert_same_bits, relative_error};

use crate::device::{TestDevice, at_most, on};
use crate::models::{KEEPING, containers, options, random_tokens};

/// Conversations of different lengths, one of them a fork, are computed together and give the same logits as alone.
pub fn conversations_go_on_together<D: TestDevice>() {
    let options = on::<D>(Precision::Fast);
    for family in KEEPING {
        let [file, _] = containers(family);
        let engine = Engine::open(&file, &options).unwrap();
        let prompts: Vec<Vec<TokenId>> =
            [3, 90, 150, 40, 7].iter().map(|&n| random_tokens(n, 50, n as u64)).collect();
        let mut together: Vec<Session> = prompts
            .iter()
            .map(|prompt| {
                let mut session = engine.session();
                session.extend(prompt).unwrap();
                session
            })
            .collect();
        let fork = together[2].fork().unwrap();
        together.push(fork);
        let mut histories = prompts.clone();
        histories.push(prompts[2].clone());
        for step in 0..at_most::<D>(3, 1) as u32 {
            let tokens: Vec<[TokenId; 1]> = (0..6).map(|i| [TokenId((7 * i + step) % 50)]).collect();
            let mut logits = vec![Vec::new(); 6];
            let mut turns: Vec<Turn<'_>> = together
                .iter_mut()
                .zip(&tokens)
                .map(|(session, tokens)| Turn { session, tokens, logits: true, marks: &[] })
                .collect();
            let mut taken = engine.step(&mut turns, &Cancel::default()).unwrap();
            while let Some((i, mut row)) = taken.next_row().unwrap() {
                logits[i] = row.all().unwrap().to_vec();
            }
            taken.finish().unwrap();
            for (i, history) in histories.iter_mut().enumerate() {
                history.extend(tokens[i]);
                let mut alone = engine.session();
                alone.extend(history).unwrap();
                let error = relative_error(&logits[i], alone.logits());
                assert!(error < 1e-2, "{family}, conversation {i}, step {step}: {error}");
            }
        }
    }
}

/// A conversation that one device saved continues on another.
pub fn snapshots_move_between_devices<D: TestDevice>() {
    let on_device = on::<D>(Precision::Fast);
    let folder = tempfile::tempdir().unwrap();
    for family in KEEPING {
        let [file, _] = containers(family);
        let engines = [on_device.clone(), options(Precision::Fast)].map(|o| Engine::open(&file, &o).unwrap());
        let tokens = random_tokens(100, 50, 3);
        for (here, there) in [(&engines[0], &engines[1]), (&engines[1], &engines[0])] {
            let path = folder.path().join("conversation");
            let mut first = here.session();
            first.extend(&tokens).unwrap();
            first.save(&path).unwrap();
            let mut moved = Session::load(there, &path).unwrap();
            for id in [1, 2, 3] {
                first.push(TokenId(id)).unwrap();
                moved.push(TokenId(id)).unwrap();
            }
            let error = relative_error(moved.logits(), first.logits());
            assert!(error < 3e-2, "{family}: {error}");
        }
    }
}

/// Copies of one thread do not become part of the graph that another thread records.
pub fn conversations_are_saved_and_loaded_while_others_compute<D: TestDevice>() {
    let options = on::<D>(Precision::Fast);
    let folder = tempfile::tempdir().unwrap();
    let [file, _] = containers("qwen3moe");
    let engine = Engine::open(&file, &options).unwrap();
    let mut kept = engine.session();
    kept.extend(&random_tokens(200, 50, 1)).unwrap();
    let path = folder.path().join("conversation");
    let done = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (kept, engine) = (kept, &engine);
            while !done.load(Ordering::Relaxed) {
                kept.save(&path).unwrap();
                let loaded = Session::load(engine, &path).unwrap();
                assert_eq!(loaded.logits(), kept.logits());
            }
        });
        // Runs even if an assertion fails.
        let _guard = Finally(|| done.store(true, Ordering::Relaxed));
        // Each number of tokens is recorded anew, and becomes a graph when it is repeated.
        for count in 1..24 {
            let mut twice = [(); 2].map(|()| engine.session());
            for session in &mut twice {
                session.extend(&random_tokens(count, 50, 2)).unwrap();
            }
            assert_eq!(twice[0].logits(), twice[1].logits(), "{count} tokens");
        }
    });
}

/// Calls a function when dropped.
struct Finally<F: Fn()>(F);

impl<F: Fn()> Drop for Finally<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Rewinding and continuing, with windows and recurrent states.
pub fn a_conversation_goes_back<D: TestDevice>() {
    let options = on::<D>(Precision::Fast);
    for family in KEEPING {
        let [file, _] = containers(family);
        let engine = Engine::open(&file, &options).unwrap();
        let mut session = engine.session();
        session.extend(&random_tokens(200, 50, 1)).unwrap();
        let mut other = random_tokens(120, 50, 1);
        other.extend(random_tokens(30, 50, 2));
        session.extend(&other).unwrap();
        let mut fresh = engine.session();
        fresh.extend(&other).unwrap();
        let error = relative_error(session.logits(), fresh.logits());
        assert!(error < 1e-2, "{family}: {error}");
    }
}

/// A model that is split by layers gives the bits of the whole model on the same device: prompts and single tokens.
pub fn stages_change_no_bit<D: TestDevice>() {
    let tokens = random_tokens(12, 50, 7);
    for family in KEEPING {
        let [file, _] = containers(family);
        let options = on::<D>(Precision::Fast).chunk(8);
        let first = Stage::open(&file, &options.clone().layers(0..1)).unwrap();
        let whole = Engine::open(&file, &options).unwrap();
        let staged = Engine::after(vec![Box::new(first.host())], &file, &options).unwrap();
        let [mut alone, mut in_stages] = [&whole, &staged].map(Engine::session);
        for session in [&mut alone, &mut in_stages] {
            session.extend(&tokens).unwrap();
        }
        assert_same_bits(in_stages.logits(), alone.logits(), &format!("{family}, prompt"));
        for session in [&mut alone, &mut in_stages] {
            session.push(TokenId(9)).unwrap();
        }
        assert_same_bits(in_stages.logits(), alone.logits(), &format!("{family}, token"));
    }
}
