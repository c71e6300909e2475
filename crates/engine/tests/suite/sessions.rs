//! A session keeps what it has computed, gives the bits of a new session whatever happened before, and remains usable
//! after every error.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use forebay_engine::chat::{Message, RenderOptions};
use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{
    Cancel, Engine, Error, Extended, Options, Precision, PromptMeter, Session, TokenId, Turn,
};
use forebay_testing::assert_same_bits;

use crate::common::models::{KEEPING, containers, data, demo_model, options, random_tokens, trained};

fn open(options: Options) -> Engine {
    Engine::open(&data("golden/qwen3moe.gguf"), &options.threads(2)).unwrap()
}

fn tokens(count: usize) -> Vec<TokenId> {
    random_tokens(count, 160, 11)
}

/// Another token. The same token would hide that its predecessor was not removed.
fn other_than(token: TokenId) -> TokenId {
    TokenId((token.0 + 1) % 160)
}

/// Asserts that the logits are those of a new session.
fn assert_as_fresh(session: &Session, what: &str) {
    let mut fresh = session.engine().session();
    fresh.extend(session.tokens()).unwrap();
    assert_same_bits(session.logits(), fresh.logits(), what);
}

#[test]
fn only_what_follows_the_longest_common_prefix_is_computed() {
    let engine = open(Options::default().chunk(16));
    let story = tokens(100);
    let other = random_tokens(30, 160, 12);
    assert_ne!(story[70], other[0]);
    let mut session = engine.session();
    assert!(session.tokens().is_empty() && session.logits().is_empty());

    let branch = [&story[..70], &other].concat();
    for (what, tokens, reused, computed) in [
        ("the first prompt", &story[..80], 0, 80),
        ("the same again", &story[..80], 80, 0),
        ("a longer one", &story[..100], 80, 20),
        ("another end", &branch, 70, 30),
        // The last token is computed again, because only the logits after the very last token are kept.
        ("back to a prefix", &story[..65], 64, 1),
        ("forward again", &branch, 65, 35),
        ("back to the first token", &story[..1], 0, 1),
        ("another first token", &other, 0, 30),
    ] {
        let extended = session.extend(tokens).unwrap();
        assert_eq!(extended, Extended { reused, computed }, "{what}");
        assert_eq!(session.tokens(), tokens, "{what}");
        assert_as_fresh(&session, what);
    }
    session.push(story[5]).unwrap();
    assert_eq!(session.tokens().len(), 31);
    assert_as_fresh(&session, "a token more");
}

#[test]
fn progress_counts_what_is_computed() {
    let engine = open(Options::default().chunk(16));
    let story = tokens(60);
    let mut session = engine.session();
    session.extend(&story[..20]).unwrap();
    let mut seen = Vec::new();
    let mut progress = |meter: &PromptMeter| seen.push((meter.read().done, meter.read().total));
    session.extend_watched(&story, &mut progress).unwrap();
    assert_eq!(seen, [(0.0, 40), (16.0, 40), (32.0, 40), (40.0, 40)]);
}

#[test]
fn every_position_is_watched_once_and_in_order() {
    let engine = open(Options::default().chunk(16));
    let story = tokens(40);
    let mut session = engine.session();
    session.extend(&story[..20]).unwrap();
    let mut seen = Vec::new();
    let mut rows = engine.all_logits(&mut session, &story).unwrap();
    while let Some((position, logits)) = rows.next_row().unwrap() {
        seen.push((position, logits.to_vec()));
    }
    drop(rows);
    assert_eq!(session.tokens(), story);
    assert!(seen.iter().map(|(position, _)| *position).eq(0..40));
    assert_same_bits(session.logits(), &seen[39].1, "the last position's");
}

#[test]
fn more_tokens_than_the_context_are_refused_with_both_numbers() {
    let engine = open(Options::default().context(16));
    assert_eq!(engine.context(), 16);
    let story = tokens(17);
    let mut session = engine.session();
    let assert_refused = |result: Result<(), Error>| match result {
        Err(error @ Error::Context { tokens: 17, limit: 16 }) => {
            let message = error.to_string();
            assert!(message.contains("17") && message.contains("16"), "{message}");
        }
        other => panic!("{other:?}"),
    };
    assert_refused(session.extend(&story).map(drop));
    session.extend(&story[..16]).unwrap();
    assert_as_fresh(&session, "after too long a prompt");
    assert_refused(session.push(story[16]));
    assert_refused(session.extend(&story).map(drop));
    assert_eq!(session.tokens(), &story[..16]);
    assert_as_fresh(&session, "after a token too many");
    session.extend(&story[1..]).unwrap();
    assert_as_fresh(&session, "after making room");
}

#[test]
fn a_refused_prompt_leaves_the_session_as_it_was() {
    let engine = open(Options::default());
    let story = tokens(20);
    let vocab = engine.vocab_size();
    let outside = TokenId(vocab as u32);
    let mut session = engine.session();
    session.extend(&story).unwrap();

    let refusals = [
        (session.extend(&[]).map(drop), "no tokens".to_owned()),
        (session.extend(&[story[0], outside, story[1]]).map(drop), format!("token {vocab} ")),
        (session.push(outside), format!("vocabulary of {vocab} ")),
        (session.push(TokenId(u32::MAX)), "token 4294967295 ".to_owned()),
    ];
    for (result, expected) in refusals {
        match result {
            Err(Error::Invalid(message)) => assert!(message.contains(&expected), "{message}"),
            other => panic!("{other:?} instead of {expected:?}"),
        }
    }
    assert_eq!(session.tokens(), story);
    assert_as_fresh(&session, "after refusals");
    session.push(TokenId(vocab as u32 - 1)).unwrap();
    assert_as_fresh(&session, "after the last token of the vocabulary");
}

#[test]
fn another_thread_can_stop_a_long_prompt() {
    let options = Options::default().threads(2).chunk(32);
    let engine = Engine::open(&demo_model(), &options).unwrap();
    let story = random_tokens(engine.context().min(4000), 4096, 13);
    let mut session = engine.session();
    let cancel = session.cancel().clone();
    let (begun, has_begun) = mpsc::channel();
    let (stopped, has_stopped) = mpsc::channel();
    let stopper = std::thread::spawn(move || {
        has_begun.recv().unwrap();
        cancel.cancel();
        stopped.send(()).unwrap();
    });
    // The next chunk is in progress when it is cancelled. The cancelling thread has until the last chunk.
    let mut chunks = 0;
    let mut progress = |meter: &PromptMeter| {
        chunks = meter.read().done as usize / 32;
        match chunks {
            1 => begun.send(()).unwrap(),
            3 => has_stopped.recv().unwrap(),
            _ => {}
        }
    };
    let result = session.extend_watched(&story, &mut progress);
    assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
    assert!(chunks <= 3, "{chunks} chunks were computed");
    stopper.join().unwrap();

    // Complete chunks are kept, and nothing of the interrupted one.
    let held = session.tokens().len();
    assert!(held >= 32 && held.is_multiple_of(32) && held < story.len(), "{held} tokens are held");
    assert!(matches!(session.push(story[0]), Err(Error::Cancelled)), "the request to stop holds");
    session.cancel().reset();
    let extended = session.extend(&story[..held + 9]).unwrap();
    assert_eq!(extended, Extended { reused: held, computed: 9 });
    assert_as_fresh(&session, "after a cancelled prompt");
}

#[test]
fn a_cancelled_token_changes_nothing() {
    let engine = open(Options::default());
    let story = tokens(20);
    let mut session = engine.session();
    session.extend(&story).unwrap();
    session.cancel().cancel();
    assert!(matches!(session.push(story[0]), Err(Error::Cancelled)));
    assert_eq!(session.tokens(), story);
    assert_as_fresh(&session, "after a cancelled token");
    session.cancel().reset();
    session.push(story[1]).unwrap();
    assert_as_fresh(&session, "after another token");
}

/// A chunk's logits are computed after all its layers have stored their states.
#[test]
fn a_chunk_that_is_cancelled_at_its_end_is_forgotten() {
    let engine = open(Options::default().chunk(32));
    let story = tokens(64);
    let mut session = engine.session();
    let cancel = session.cancel().clone();
    let mut rows = engine.all_logits(&mut session, &story).unwrap();
    let error = loop {
        match rows.next_row() {
            Ok(row) if row.unwrap().0 == 40 => cancel.cancel(),
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Cancelled), "{error:?}");
    drop(rows);
    assert_eq!(session.tokens(), &story[..32]);
    assert!(session.logits().is_empty());
    session.cancel().reset();
    session.push(other_than(story[32])).unwrap();
    assert_as_fresh(&session, "after a cancelled chunk");
}

#[test]
fn a_chunk_whose_reader_panics_is_forgotten() {
    let engine = open(Options::default().chunk(32));
    let story = tokens(64);
    let mut session = engine.session();
    let read = || {
        let mut rows = engine.all_logits(&mut session, &story).unwrap();
        while let Some((position, _)) = rows.next_row().unwrap() {
            assert_ne!(position, 40, "this panic is part of the test");
        }
    };
    assert!(catch_unwind(AssertUnwindSafe(read)).is_err());
    assert_eq!(session.tokens(), &story[..32]);
    session.push(other_than(story[32])).unwrap();
    assert_as_fresh(&session, "after a panic");
}

#[test]
fn sessions_in_two_threads_do_not_disturb_each_other() {
    let engine = open(Options::default().chunk(8));
    let prompts = [tokens(90), random_tokens(70, 160, 14)];
    let answers = prompts.each_ref().map(|prompt| {
        let mut session = engine.session();
        std::thread::spawn({
            let prompt = prompt.clone();
            move || {
                session.extend(&prompt[..50]).unwrap();
                prompt[50..].iter().for_each(|&token| session.push(token).unwrap());
                session
            }
        })
    });
    for answer in answers {
        assert_as_fresh(&answer.join().unwrap(), "beside another session");
    }
}

/// Four conversations of different lengths take steps together: two process prompts, two generate.
#[test]
fn conversations_that_step_together_give_the_bits_of_each_alone() {
    for family in KEEPING {
        for precision in [Precision::Fast, Precision::Exact] {
            let [file, _] = containers(family);
            let engine = Engine::open(&file, &options(precision)).unwrap();
            let stories = [22, 23, 24, 25].map(|seed| random_tokens(60, 160, seed));
            let mut sessions = [0, 7, 33, 1].map(|len| {
                let mut session = engine.session();
                if len > 0 {
                    session.extend(&stories[0][..len]).unwrap();
                }
                session
            });
            for cuts in [[20, 1, 1, 1], [1, 1, 13, 1], [1, 1, 1, 1]] {
                let mut turns: Vec<Turn<'_>> = sessions
                    .iter_mut()
                    .zip(&stories)
                    .zip(cuts)
                    .map(|((session, story), count)| {
                        let at = session.tokens().len();
                        Turn { tokens: &story[at..at + count], session, logits: count != 13, marks: &[] }
                    })
                    .collect();
                let mut given = Vec::new();
                let mut step = engine.step(&mut turns, &Cancel::default()).unwrap();
                while let Some((turn, mut logits)) = step.next_row().unwrap() {
                    given.push((turn, logits.all().unwrap().to_vec()));
                }
                step.finish().unwrap();
                for (i, logits) in &given {
                    let mut fresh = engine.session();
                    fresh.extend(sessions[*i].tokens()).unwrap();
                    let what = format!("{family}, {precision:?}, {cuts:?}, turn {i}");
                    assert_same_bits(logits, fresh.logits(), &what);
                }
                let wanted = (0..4).filter(|&i| cuts[i] != 13);
                assert!(given.iter().map(|(turn, _)| *turn).eq(wanted));
            }
        }
    }
}

#[test]
fn a_step_that_fails_changes_no_conversation() {
    let engine = open(Options::default().chunk(16));
    let story = tokens(60);
    let mut sessions = [engine.session(), engine.session()];
    sessions[0].extend(&story[..10]).unwrap();
    sessions[1].extend(&story[..30]).unwrap();
    let cancelled = Cancel::default();
    cancelled.cancel();
    let outside = [TokenId(u32::MAX)];
    for (first, second, cancel, expected) in [
        (&story[10..11], &story[30..31], &cancelled, "cancelled"),
        (&story[10..11], &outside[..], &Cancel::default(), "vocabulary"),
        (&story[10..11], &story[..0], &Cancel::default(), "no tokens"),
        (&story[10..20], &story[30..40], &Cancel::default(), "at most 16 tokens, not 20"),
    ] {
        let [a, b] = &mut sessions;
        let mut turns = [
            Turn { session: a, tokens: first, logits: true, marks: &[] },
            Turn { session: b, tokens: second, logits: true, marks: &[] },
        ];
        let error = engine.step(&mut turns, cancel).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!((sessions[0].tokens(), sessions[1].tokens()), (&story[..10], &story[..30]));
    }
    let mut stranger = open(Options::default()).session();
    let mut turns = [Turn { session: &mut stranger, tokens: &story[..1], logits: false, marks: &[] }];
    assert!(engine.step(&mut turns, &Cancel::default()).is_err());
    // A step that is not finished changes nothing, either.
    let [a, b] = &mut sessions;
    let mut turns = [
        Turn { session: a, tokens: &story[10..14], logits: true, marks: &[] },
        Turn { session: b, tokens: &story[30..31], logits: true, marks: &[] },
    ];
    let mut step = engine.step(&mut turns, &Cancel::default()).unwrap();
    assert_eq!(step.next_row().unwrap().unwrap().0, 0);
    drop(step);
    assert_eq!((sessions[0].tokens(), sessions[1].tokens()), (&story[..10], &story[..30]));
    for session in &mut sessions {
        session.push(other_than(story[30])).unwrap();
        assert_as_fresh(session, "after steps that failed");
    }
}

#[test]
fn forks_go_their_own_ways() {
    for family in KEEPING {
        let [file, _] = containers(family);
        let engine = Engine::open(&file, &options(Precision::Fast)).unwrap();
        let story = random_tokens(200, 160, 26);
        let mut session = engine.session();
        session.extend(&story[..150]).unwrap();
        let mut fork = session.fork().unwrap();
        assert_eq!(fork.tokens(), session.tokens());
        assert_same_bits(fork.logits(), session.logits(), family);
        let mut grandchild = fork.fork().unwrap();
        session.push(story[150]).unwrap();
        fork.push(other_than(story[150])).unwrap();
        grandchild.extend(&[&story[..150], &story[..30]].concat()).unwrap();
        assert_as_fresh(&session, family);
        drop(session);
        for token in &story[..20] {
            fork.push(*token).unwrap();
        }
        fork.extend(&story[..100]).unwrap();
        assert_as_fresh(&fork, family);
        assert_as_fresh(&grandchild, family);
    }
}

/// A batch that is cancelled in the middle has changed the states of some layers and not of others.
#[test]
fn a_batch_that_is_cancelled_between_layers_leaves_no_trace() {
    for family in KEEPING {
        let [file, _] = containers(family);
        let engine = Engine::open(&file, &options(Precision::Fast).chunk(32)).unwrap();
        let story = random_tokens(100, 160, 27);
        let mut session = engine.session();
        session.extend(&story[..40]).unwrap();
        for (batch, last_layer) in [(1, 0), (1, 1), (20, 0), (20, 1)] {
            // The condition runs before each layer, and before the logits.
            let asked = AtomicUsize::new(0);
            session.obey(&Cancel::when(move || asked.fetch_add(1, Ordering::Relaxed) > last_layer));
            let held = session.tokens().to_vec();
            let result = match batch {
                1 => session.push(story[60]),
                _ => session.extend(&[&held[..], &story[60..80]].concat()).map(drop),
            };
            assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
            assert_eq!(session.tokens(), held);
            session.obey(&Cancel::default());
            session.push(other_than(story[60])).unwrap();
            assert_as_fresh(
                &session,
                &format!("{family}, {batch} tokens cancelled after layer {last_layer}"),
            );
        }
    }
}

/// The next prompt lacks the reasoning, so it differs from the session where the last answer began.
#[test]
fn a_history_without_its_reasoning_costs_no_more_than_the_last_answer() {
    for family in KEEPING {
        let [file, _] = containers(family);
        let engine = Engine::open(&file, &options(Precision::Fast)).unwrap();
        let mut session = engine.session();
        let mut history: Vec<TokenId> = Vec::new();
        for turn in 0..20 {
            let question = random_tokens(4, 160, 100 + turn);
            let prompt = [&history[..], &question].concat();
            let before = session.tokens().len();
            let extended = session.extend(&prompt).unwrap();
            // The last answer without its reasoning, and the question.
            let new = if turn == 0 { 4 } else { 3 + 4 };
            assert_eq!(
                extended,
                Extended { reused: prompt.len() - new, computed: new },
                "{family}, turn {turn}"
            );
            assert!(before == 0 || extended.reused < before, "there was reasoning to forget");
            assert_as_fresh(&session, &format!("{family}, turn {turn}"));
            let [reasoning, answer] =
                [(5, 200), (3, 300)].map(|(n, seed)| random_tokens(n, 160, seed + turn));
            for token in reasoning.into_iter().chain(answer.iter().copied()) {
                session.push(token).unwrap();
            }
            history = [prompt, answer].concat();
        }
    }
}

/// The same with a trained model's own template, whose recurrent layers can be rewound only to marks.
#[test]
fn twenty_turns_of_a_trained_model_are_never_read_again() {
    let Some(model) = trained("tales-qwen35moe-Q4_K_M.gguf") else { return };
    let engine = Engine::open(&model, &options(Precision::Fast)).unwrap();
    let template = engine.template().unwrap().unwrap();
    let tokenizer = engine.tokenizer();
    let render = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let mut session = engine.session();
    let mut messages: Vec<Message> = Vec::new();
    let mut last_prompt = 0;
    for turn in 0..20 {
        messages.push(Message::new("user", format!("Tell me story number {turn}.")));
        let text = template.render(&messages, &render).unwrap();
        let prompt = tokenizer.encode(&text, EncodeOptions { special: true, bos: Bos::Never }).unwrap();
        let held = session.tokens().len();
        let extended = session.extend(&prompt).unwrap();
        // New in the prompt: the last answer without its reasoning, and the question.
        assert!(extended.computed <= prompt.len() - last_prompt, "turn {turn}: {extended:?}");
        assert!(turn == 0 || extended.reused < held, "turn {turn}: there was reasoning to forget");
        last_prompt = prompt.len();
        let mut written = Vec::new();
        for _ in 0..16 {
            let logits = session.logits();
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            written.push(TokenId(best as u32));
            session.push(TokenId(best as u32)).unwrap();
        }
        messages.push(Message::new("assistant", tokenizer.decode(&written[10..], false)));
    }
    assert_as_fresh(&session, "after twenty turns");
}
