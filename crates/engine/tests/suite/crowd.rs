//! Many requests at once: an answer does not depend on other requests, and no request waits for ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use forebay_engine::plan::ExpertMemory;
use forebay_engine::{
    Answer, Cancel, Client, Crowd, CrowdOptions, Engine, Error, FinishReason, Options, Precision,
    PrefixOptions, Request, Tenant, TokenId,
};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::common::models::{KEEPING, containers, data, demo_model, options, random_tokens};
use crate::common::served::{Ear, add, add_leaving, alone, assert_same, finish, request};

fn open(family: &str, chunk: usize) -> Engine {
    let [file, _] = containers(family);
    Engine::open(&file, &options(Precision::Fast).chunk(chunk)).unwrap()
}

/// Requests of many lengths, some with the same beginning.
fn requests(count: usize) -> Vec<Request> {
    let shared = random_tokens(50, 160, 1);
    (0..count)
        .map(|i| {
            let mut prompt = random_tokens(1 + i * 37 % 90, 160, 100 + i as u64);
            if i % 3 == 0 {
                prompt = [&shared[..20 + i % 30], &prompt].concat();
            }
            request(&prompt, 3 + i * 11 % 30, i as u64)
        })
        .collect()
}

#[test]
fn nobodys_text_depends_on_who_else_is_served() {
    for family in KEEPING {
        let engine = open(family, 24);
        let requests = requests(16);
        let expected: Vec<Answer> = requests.iter().map(|request| alone(&engine, request)).collect();
        for seed in 0..4 {
            let what = format!("{family}, {seed}");
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let mut chance = |of: u32| rng.next_u32() % of == 0;
            let mut options = CrowdOptions::new(5);
            if seed % 2 == 1 {
                options.prefixes = Some(PrefixOptions { gain: 8, ..PrefixOptions::new(&engine, None) });
            }
            let mut crowd = Crowd::new(&engine, options);
            let mut left = requests.iter().zip(&expected).cycle().take(32).peekable();
            let (mut served, mut leaving) = (Vec::new(), Vec::new());
            loop {
                while chance(2) {
                    let Some((request, expected)) = left.next() else { break };
                    if chance(4) {
                        let (cancel, ear) = add_leaving(&mut crowd, request);
                        leaving.push((cancel, ear, expected));
                    } else {
                        served.push((add(&mut crowd, request), expected));
                    }
                }
                for (cancel, ..) in &leaving {
                    if chance(8) {
                        cancel.cancel();
                    }
                }
                if crowd.is_empty() && left.peek().is_none() {
                    break;
                }
                assert!(crowd.running() <= 5);
                crowd.step(&Cancel::default()).unwrap();
            }
            assert!(served.len() > 10 && leaving.len() > 2, "{what}");
            for (ear, expected) in served {
                assert_same(&ear.answer(), expected, &what);
            }
            for (_, ear, expected) in leaving {
                let answer = ear.answer();
                match answer.finish_reason {
                    FinishReason::Cancelled => assert!(expected.tokens.starts_with(&answer.tokens), "{what}"),
                    _ => assert_same(&answer, expected, &what),
                }
            }
        }
    }
}

#[test]
fn those_who_write_get_a_token_with_every_pass_and_short_prompts_pass_long_ones() {
    let engine = Engine::open(&demo_model(), &Options::default().chunk(32)).unwrap();
    let mut crowd = Crowd::new(&engine, CrowdOptions::new(8));
    let step = |crowd: &mut Crowd| crowd.step(&Cancel::default()).unwrap();
    let story = random_tokens(1000, 4096, 2);
    let writer = add(&mut crowd, &request(&story[..10], 30, 1));
    assert_eq!(step(&mut crowd), 1, "alone, a prompt is one pass");
    let long = add(&mut crowd, &request(&story[100..], 5, 2));
    assert_eq!(step(&mut crowd), 1);
    let short = add(&mut crowd, &request(&story[20..30], 1, 3));
    assert_eq!(step(&mut crowd), 2, "a token for the one who writes, and the short prompt has been read");
    assert_eq!(short.answer().tokens.len(), 1);
    let mut steps = 3;
    while !writer.has_ended() {
        assert!(step(&mut crowd) >= 1);
        steps += 1;
    }
    assert_eq!(steps, 30, "one token with every pass");
    let before = long.progress();
    assert!(before.len() == 29 && !long.has_ended(), "the long prompt got on with every pass: {before:?}");
    finish(&mut crowd);
    let progress = long.progress();
    assert!(progress.is_sorted() && progress.iter().all(|(_, total)| *total == 900));
    assert_eq!(progress.last(), Some(&(900, 900)));
    // By then no request generates, so passes are as large as possible.
    let rest = &progress[before.len()..];
    assert!(rest.windows(2).all(|pair| pair[1].0 - pair[0].0 == 32 || pair[1].0 == 900), "{rest:?}");
}

#[test]
fn answers_to_one_prompt_read_it_once() {
    for family in KEEPING {
        let engine = open(family, 48);
        let prompt = random_tokens(200, 160, 3);
        let other = [&prompt[..150], &random_tokens(30, 160, 4)].concat();
        let mut crowd = Crowd::new(&engine, CrowdOptions::new(8));
        let requests: Vec<Request> = (0..4)
            .map(|seed| request(&prompt, 10, seed))
            .chain((4..6).map(|seed| request(&other, 10, seed)))
            .collect();
        let ears: Vec<Ear> = requests.iter().map(|request| add(&mut crowd, request)).collect();
        finish(&mut crowd);
        let answers: Vec<Answer> = ears.iter().map(Ear::answer).collect();
        for (request, answer) in requests.iter().zip(&answers) {
            assert_same(answer, &alone(&engine, request), family);
        }
        let reused: Vec<usize> = answers.iter().map(|answer| answer.stats.reused_tokens).collect();
        assert_eq!(reused, [0, 199, 199, 199, 150, 179], "{family}");
        assert_eq!(ears[1].progress(), [(1, 1)], "{family}");
    }
}

/// Two requests wait for a prompt, and the second of them also for the first. When the client of that prompt leaves,
/// the first must not wait for the second.
#[test]
fn who_loses_the_prompt_it_waited_for_does_not_wait_for_its_own_follower() {
    for family in KEEPING {
        let engine = open(family, 32);
        let shared = random_tokens(60, 160, 20);
        let twin = request(&[&shared[..], &random_tokens(40, 160, 21)].concat(), 5, 1);
        let leads = request(&[&shared[..], &random_tokens(30, 160, 22)].concat(), 5, 2);
        let mut crowd = Crowd::new(&engine, CrowdOptions::new(4));
        let (cancel, leader) = add_leaving(&mut crowd, &leads);
        let twins = [add(&mut crowd, &twin), add(&mut crowd, &twin)];
        crowd.step(&Cancel::default()).unwrap();
        assert_eq!(leader.progress(), [(32, 90)], "{family}: it has not read what they have in common");
        assert!(twins.iter().all(|ear| ear.progress().is_empty()), "{family}: both wait");
        cancel.cancel();
        finish(&mut crowd);
        assert_eq!(crowd.idle_steps(), 0, "{family}");
        let [first, second] = twins.map(|ear| ear.answer());
        assert_eq!((first.stats.reused_tokens, second.stats.reused_tokens), (0, 99), "{family}");
        let expected = alone(&engine, &twin);
        assert_same(&first, &expected, family);
        assert_same(&second, &expected, family);
    }
}

/// Requests with common beginnings come and leave at random. A step that computes nothing, or more steps than their
/// tokens need, means that some requests wait for each other.
#[test]
fn whoever_comes_and_leaves_nobody_waits_for_ever() {
    let engine = open("qwen3moe", 16);
    let parts: [Vec<TokenId>; 3] = std::array::from_fn(|i| random_tokens(34, 160, 200 + i as u64));
    for seed in 0..300 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut chance = |of: u32| rng.next_u32() % of == 0;
        let mut options = CrowdOptions::new(if chance(2) { 8 } else { 4 });
        if chance(2) {
            options.prefixes = Some(PrefixOptions::new(&engine, None));
        }
        let mut crowd = Crowd::new(&engine, options);
        let (mut left, mut steps) = (10, 0);
        let mut all = Vec::new();
        while left > 0 || !crowd.is_empty() {
            while left > 0 && chance(2) {
                left -= 1;
                let mut prompt = parts[usize::from(chance(3))].clone();
                while prompt.len() < 102 && !chance(5) {
                    prompt.extend(&parts[usize::from(chance(2))]);
                }
                if chance(2) {
                    prompt.extend(&parts[2][..1 + left]);
                }
                all.push(add_leaving(&mut crowd, &request(&prompt, 1 + left % 3, left as u64)));
            }
            for (cancel, _) in &all {
                if chance(12) {
                    cancel.cancel();
                }
            }
            crowd.step(&Cancel::default()).unwrap();
            steps += 1;
            let (running, waiting) = (crowd.running(), crowd.waiting());
            assert!(
                crowd.idle_steps() == 0 && steps < 1500,
                "seed {seed}: {running} run and {waiting} wait after {steps} steps"
            );
        }
        assert!(all.len() == 10 && all.iter().all(|(_, ear)| ear.has_ended()), "seed {seed}");
    }
}

/// A request of a client that is its own tenant.
fn from_client(number: u128, request: Request) -> Request {
    request.client(Client { tenant: Tenant(number), number })
}

#[test]
fn one_client_leaves_places_to_others_however_much_it_asks_for() {
    let engine = open("qwen3moe", 64);
    let mut crowd = Crowd::new(&engine, CrowdOptions { share: 3, ..CrowdOptions::new(4) });
    let step = |crowd: &mut Crowd| crowd.step(&Cancel::default()).unwrap();
    let ask = |crowd: &mut Crowd, client, tokens| {
        add(crowd, &from_client(client, request(&random_tokens(4, 160, 30), tokens, 1)))
    };
    let many: Vec<Ear> = (0..10).map(|_| ask(&mut crowd, 1, 20)).collect();
    step(&mut crowd);
    assert_eq!((crowd.running(), crowd.waiting()), (3, 7));
    // Another client gets a place at once.
    let other = ask(&mut crowd, 2, 1);
    step(&mut crowd);
    assert_eq!(other.answer().tokens.len(), 1);
    // A free place goes to the client with the fewest places, not to the one that came first.
    let others: Vec<Ear> = [2, 2, 3].into_iter().map(|client| ask(&mut crowd, client, 50)).collect();
    step(&mut crowd);
    assert_eq!((crowd.running(), crowd.waiting()), (4, 9), "three of the first client and one of the second");
    while !many[0].has_ended() {
        step(&mut crowd);
    }
    step(&mut crowd);
    assert_eq!(crowd.running(), 4);
    assert!(!others[2].text().is_empty(), "the third client is next, although it came last");
    finish(&mut crowd);
    assert!(many.iter().chain(&others).all(Ear::has_ended));
}

#[test]
fn tenants_share_nothing_that_is_being_computed() {
    for family in KEEPING {
        let engine = open(family, 48);
        let asked = request(&random_tokens(100, 160, 31), 8, 1);
        let prefixes = Some(PrefixOptions::new(&engine, None));
        let mut crowd = Crowd::new(&engine, CrowdOptions { prefixes, ..CrowdOptions::new(8) });
        // Two tenants at once, then a third while those generate, then the first again.
        let mut ears: Vec<Ear> =
            [1, 1, 2].map(|tenant| add(&mut crowd, &from_client(tenant, asked.clone()))).into();
        while ears.iter().any(|ear| ear.text().is_empty()) {
            crowd.step(&Cancel::default()).unwrap();
        }
        ears.push(add(&mut crowd, &from_client(3, asked.clone())));
        finish(&mut crowd);
        ears.extend([4, 1].map(|tenant| add(&mut crowd, &from_client(tenant, asked.clone()))));
        finish(&mut crowd);
        let expected = alone(&engine, &asked);
        let answers = ears.iter().map(Ear::answer);
        let reused: Vec<usize> = answers
            .inspect(|answer| assert_same(answer, &expected, family))
            .map(|answer| answer.stats.reused_tokens)
            .collect();
        assert_eq!(reused, [0, 99, 0, 0, 0, 99], "{family}");
    }
}

/// A `Cancel` that is cancelled when it is checked for the given time.
fn after_looks(looks: usize) -> (Cancel, Arc<AtomicUsize>) {
    let seen = Arc::new(AtomicUsize::new(0));
    let counter = seen.clone();
    (Cancel::when(move || counter.fetch_add(1, Ordering::SeqCst) >= looks), seen)
}

#[test]
fn a_pass_for_one_who_left_is_given_up_and_others_lose_nothing() {
    for family in KEEPING {
        let engine = open(family, 128);
        let mut crowd = Crowd::new(&engine, CrowdOptions::new(4));
        let stays = request(&random_tokens(20, 160, 5), 30, 1);
        let ear = add(&mut crowd, &stays);
        crowd.step(&Cancel::default()).unwrap();
        crowd.step(&Cancel::default()).unwrap();
        // It is checked once before the pass, then at each layer.
        let (cancel, looks) = after_looks(2);
        let leaves = Ear::default();
        crowd.add(request(&random_tokens(100, 160, 6), 5, 2), cancel, Box::new(leaves.clone()));
        assert_eq!(crowd.step(&Cancel::default()).unwrap(), 0, "{family}: the pass was given up");
        let answer = leaves.answer();
        assert_eq!((answer.finish_reason, answer.tokens.len()), (FinishReason::Cancelled, 0), "{family}");
        assert_eq!(looks.load(Ordering::SeqCst), 4, "{family}: before, two layers, and after");
        assert_eq!(crowd.step(&Cancel::default()).unwrap(), 1, "{family}");

        // One of three generating requests leaves after the pass, most of which is for the others.
        let (cancel, leaves) = (Cancel::default(), Ear::default());
        crowd.add(request(&random_tokens(9, 160, 7), 50, 2), cancel.clone(), Box::new(leaves.clone()));
        crowd.step(&Cancel::default()).unwrap();
        let last = Ear::default();
        let looks = Cancel::when(move || {
            cancel.cancel();
            false
        });
        crowd.add(request(&random_tokens(1, 160, 8), 3, 2), looks, Box::new(last.clone()));
        assert_eq!(crowd.step(&Cancel::default()).unwrap(), 3, "{family}: all three had their part");
        let answer = leaves.answer();
        assert_eq!((answer.finish_reason, answer.tokens.len()), (FinishReason::Cancelled, 2), "{family}");
        finish(&mut crowd);
        assert_same(&ear.answer(), &alone(&engine, &stays), family);
        assert_eq!(last.answer().tokens.len(), 3);
    }
}

#[test]
fn all_can_be_stopped_and_go_on() {
    let engine = open("qwen35moe", 32);
    let mut crowd = Crowd::new(&engine, CrowdOptions::new(4));
    let requests = requests(4);
    let ears: Vec<Ear> = requests.iter().map(|request| add(&mut crowd, request)).collect();
    let mut stopped = 0;
    while !crowd.is_empty() {
        let (cancel, _) = after_looks(1);
        assert!(matches!(crowd.step(&cancel), Err(Error::Cancelled)));
        stopped += 1;
        crowd.step(&Cancel::default()).unwrap();
    }
    assert!(stopped > 3);
    for (request, ear) in requests.iter().zip(ears) {
        assert_same(&ear.answer(), &alone(&engine, request), "stopped between all steps");
    }
}

#[test]
fn what_is_wrong_with_a_request_is_its_own_matter() {
    let engine = Engine::open(&data("golden/qwen3moe.gguf"), &Options::default().context(64)).unwrap();
    let mut crowd = Crowd::new(&engine, CrowdOptions::new(2));
    let good = request(&random_tokens(20, 160, 9), 10, 1);
    let full = request(&random_tokens(64, 160, 9), 10, 1);
    let mut senseless = good.clone();
    senseless.sampling.temperature = f32::NAN;
    let ears = [
        request(&[], 1, 1),
        good.clone(),
        request(&random_tokens(65, 160, 9), 10, 1),
        request(&[TokenId(u32::MAX)], 1, 1),
        full,
        senseless,
        good.clone(),
    ]
    .map(|request| add(&mut crowd, &request));
    finish(&mut crowd);
    let [empty, first, long, outside, full, senseless, second] = ears;
    assert!(empty.error().to_string().contains("no tokens"));
    assert!(matches!(long.error(), Error::Context { tokens: 65, limit: 64 }));
    assert!(outside.error().to_string().contains("vocabulary"));
    assert!(matches!(senseless.error(), Error::Field { field, .. } if field == "temperature"));
    let full = full.answer();
    assert_eq!((full.finish_reason, full.tokens.len()), (FinishReason::Length, 0));
    let expected = alone(&engine, &good);
    assert_same(&first.answer(), &expected, "beside others");
    assert_same(&second.answer(), &expected, "again");
}

/// The file is truncated while answers are generated, and restored later.
#[test]
fn a_drive_that_fails_ends_the_answers_and_not_the_crowd() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shrinking.gguf");
    let whole = std::fs::read(demo_model()).unwrap();
    std::fs::write(&path, &whole).unwrap();
    let options = Options::default().expert_memory(ExpertMemory::Percent(25.0));
    let engine = Engine::open(&path, &options).unwrap();
    let mut crowd = Crowd::new(&engine, CrowdOptions::new(2));
    let requests: Vec<Request> = (0..3).map(|i| request(&random_tokens(12, 4096, 30 + i), 40, i)).collect();
    let ears: Vec<Ear> = requests.iter().map(|request| add(&mut crowd, request)).collect();
    crowd.step(&Cancel::default()).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(whole.len() as u64 / 4).unwrap();
    while crowd.running() > 0 && !ears[0].has_ended() {
        crowd.step(&Cancel::default()).unwrap();
    }
    for ear in &ears[..2] {
        let message = ear.error().to_string();
        assert!(message.contains("shrinking.gguf"), "{message}");
    }
    std::fs::write(&path, &whole).unwrap();
    finish(&mut crowd);
    assert_same(&ears[2].answer(), &alone(&engine, &requests[2]), "who waited meanwhile");
    let ear = add(&mut crowd, &requests[0]);
    finish(&mut crowd);
    assert_same(&ear.answer(), &alone(&engine, &requests[0]), "asked again");
}

/// Whether a request ever chooses an expert of a layer; and its answer.
fn chooses(engine: &Engine, request: &Request, layer: usize, expert: u32) -> (bool, Answer) {
    let chosen = Arc::new(AtomicUsize::new(0));
    let counter = chosen.clone();
    let mut session = engine.session();
    session.watch_routing(Some(Box::new(move |routed| {
        if routed.layer.0 == layer && routed.routing.experts().contains(&expert) {
            counter.fetch_add(1, Ordering::SeqCst);
        }
    })));
    let answer = session.generate(request, &mut |_| {}).unwrap();
    (chosen.load(Ordering::SeqCst) > 0, answer)
}

/// The file is cut before the last expert of its last tensor of experts. Some requests choose that expert and others do
/// not.
#[test]
fn an_expert_that_cannot_be_read_fails_those_who_need_it_and_nobody_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.gguf");
    std::fs::copy(demo_model(), &path).unwrap();
    let whole = Engine::open(&demo_model(), &Options::default()).unwrap();
    let tensors = whole.file().tensors.iter().filter(|tensor| tensor.name.contains("_exps"));
    let last = tensors.max_by_key(|tensor| tensor.offset).unwrap();
    let experts = last.shape[0] as u64;
    let layer = last.name.split('.').nth(1).unwrap().parse().unwrap();
    // Reads are of whole blocks, so the neighbouring expert's last block must be complete.
    let end = (last.offset + last.len / experts * (experts - 1)).next_multiple_of(4096);
    assert!(end + 4096 < last.offset + last.len);

    let requests = (0..40).map(|i| request(&random_tokens(2, 4096, 300 + i), 3, i));
    let (needing, others): (Vec<_>, Vec<_>) = requests
        .map(|request| (chooses(&whole, &request, layer, experts as u32 - 1), request))
        .partition(|((needs, _), _)| *needs);
    assert!(needing.len() >= 3 && others.len() >= 4, "{} and {}", needing.len(), others.len());

    let options = Options::default().expert_memory(ExpertMemory::Percent(25.0));
    let engine = Engine::open(&path, &options).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(end).unwrap();
    let mut crowd = Crowd::new(&engine, CrowdOptions::new(8));
    let mixed = others[..2].iter().chain(&needing[..3]).chain(&others[2..4]);
    let ears: Vec<_> =
        mixed.map(|((needs, answer), request)| (add(&mut crowd, request), needs, answer)).collect();
    finish(&mut crowd);
    for (ear, needs, answer) in ears {
        if *needs {
            let message = ear.error().to_string();
            assert!(message.contains("cut.gguf"), "{message}");
        } else {
            assert_same(&ear.answer(), answer, "beside some that fail");
        }
    }
}

#[test]
fn an_answer_says_what_it_took() {
    let engine = open("qwen3moe", 16);
    let mut crowd =
        Crowd::new(&engine, CrowdOptions { pace: Duration::from_millis(1), ..CrowdOptions::new(1) });
    let request = request(&random_tokens(40, 160, 10), 12, 1);
    let [first, second] = [add(&mut crowd, &request), add(&mut crowd, &request)];
    finish(&mut crowd);
    let [first, second] = [first, second].map(|ear| ear.answer().stats);
    for stats in [first, second] {
        assert_eq!((stats.prompt_tokens, stats.generated_tokens, stats.decode_steps), (40, 12, 11));
        assert_eq!(stats.steps_per_second(), 11.0 / stats.decode_seconds);
        assert!(stats.prompt_seconds > 0.0 && stats.decode_seconds > 0.0 && stats.experts.hits > 0);
        assert!(stats.prompt_experts.hits > 0 && stats.ttft_seconds >= stats.prompt_seconds);
    }
    // The second waited for the first, whose tokens were all generated after both requests had been submitted.
    assert!(second.ttft_seconds > first.decode_seconds && second.ttft_seconds > second.prompt_seconds);
}
