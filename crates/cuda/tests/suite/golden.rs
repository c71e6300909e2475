//! Logits on a GPU against code we did not write, and against the processor.

use std::sync::atomic::{AtomicBool, Ordering};

use forebay_engine::{Cancel, Engine, Options, Precision, Session, TokenId, Turn};
use forebay_testing::{Need, relative_error, skipped};

use crate::common::emulator::is_emulated;
use crate::common::models::{
    DEMO_LOGITS, KEEPING, Reference, assert_close_by_default, containers, data, demo_model, distance, logits,
    options, random_tokens, tiny_models, trained,
};
use crate::common::{at_most, gpu};

fn on_gpu(precision: Precision) -> Option<Options> {
    Some(Options { device: Some(gpu()?), ..options(precision) })
}

#[test]
fn exact_logits_of_the_tiny_models_equal_those_of_others() {
    let Some(options) = on_gpu(Precision::Exact) else { return };
    for (model, reference) in tiny_models() {
        let error = distance(&model, &options, &Reference::read(&reference));
        println!("{}: {error:.2e}", model.display());
        assert!(error < 1e-3, "{}: relative error {error}", model.display());
    }
}

#[test]
fn logits_of_quantised_folders_equal_those_of_others() {
    for name in ["qwen3moe-mlx", "qwen3moe-fp8"] {
        let Some(options) = on_gpu(Precision::Exact) else { return };
        let model = data(&format!("golden/{name}"));
        let error =
            distance(&model, &options, &Reference::read(&format!("golden/{name}.logits.safetensors")));
        println!("{name}: {error:.2e}");
        assert!(error < 1e-3, "{name}: relative error {error}");
        assert_close_by_default(&model, &Options { precision: Precision::Fast, ..options });
    }
}

#[test]
fn logits_of_the_tiny_models_are_close_by_default() {
    let Some(options) = on_gpu(Precision::Fast) else { return };
    for (model, _) in tiny_models() {
        assert_close_by_default(&model, &options);
    }
}

#[test]
fn logits_of_the_demo_model_equal_those_of_transformers() {
    let reference = Reference::read(DEMO_LOGITS);
    for (precision, tolerance) in [(Precision::Exact, 1e-3), (Precision::Fast, 1e-2)] {
        let Some(options) = on_gpu(precision) else { return };
        let error = distance(&demo_model(), &options, &reference);
        println!("{precision:?}: {error:.2e}");
        assert!(error < tolerance, "{precision:?}: relative error {error}");
    }
}

/// Of the kind that the trained models know, and longer than a chunk of linear attention. Of tokens at random they are as
/// unsure as models without training.
const STORY: &str = "Once upon a time there was a little boy named Tom. Tom had a red ball, and he loved to play with it in \
    the garden. One day the ball rolled under the big tree, and Tom could not find it. He looked and looked, but it was gone. \
    Then he saw a small brown dog. The dog had the ball in its mouth! Tom was happy, and he said, \"Thank you, dog!\" The dog \
    ran around him and barked. They played until the sun went down. Tom's mom called him for dinner. \"Can the dog come, too?\" \
    he asked. His mom smiled and said yes. From that day on, Tom and the dog were best friends.";

#[test]
fn logits_of_trained_models_equal_the_processors() {
    if is_emulated() {
        return skipped(Need::RealGpu, "on the emulator the demo model stands for the trained ones");
    }
    let Some(on_gpu) = on_gpu(Precision::Fast) else { return };
    for name in ["tales-qwen35moe", "tales-deepseek_v3", "tales-qwen3moe"] {
        for model in [format!("{name}-Q4_K_M.gguf"), format!("{name}-mlx-4bit"), name.to_owned()] {
            let Some(model) = trained(&model) else { continue };
            let exact = options(Precision::Exact);
            let tokens =
                Engine::open(&model, &exact).unwrap().tokenizer().encode(STORY, Default::default()).unwrap();
            assert!(tokens.len() > 100);
            let [ours, truth] = [&on_gpu, &exact].map(|options| logits(&model, options, &tokens));
            let error = relative_error(&ours, &truth);
            println!("{}: {error:.2e}", model.display());
            assert!(error < 1e-2, "{}: relative error {error}", model.display());
        }
    }
}

fn likeliest(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap()
}

/// By how much the likeliest token's logit is above the next, in units of the logits' length over all.
fn lead(logits: &[f32]) -> f32 {
    let best = likeliest(logits);
    let next = (0..logits.len()).filter(|&i| i != best).map(|i| logits[i]).fold(f32::NEG_INFINITY, f32::max);
    let spread = (logits.iter().map(|x| x * x).sum::<f32>() / logits.len() as f32).sqrt();
    (logits[best] - next) / spread
}

#[test]
fn greedy_text_is_the_processors_until_two_tokens_are_as_likely() {
    let Some(on_gpu) = on_gpu(Precision::Fast) else { return };
    let models = [
        Some(demo_model()),
        trained("tales-qwen35moe-Q4_K_M.gguf"),
        trained("tales-deepseek_v3-Q4_K_M.gguf"),
    ];
    for model in models.into_iter().flatten().take(at_most(3, 1)) {
        let engines = [on_gpu.clone(), options(Precision::Exact)].map(|o| Engine::open(&model, &o).unwrap());
        let prompt = engines[0].tokenizer().encode("Once upon a time", Default::default()).unwrap();
        let [mut ours, mut truth] = engines.map(|engine| {
            let mut session = engine.session();
            session.extend(&prompt).unwrap();
            session
        });
        let mut written = 0;
        for _ in 0..at_most(200, 30) {
            let next = likeliest(truth.logits());
            if likeliest(ours.logits()) != next {
                let lead = lead(truth.logits());
                assert!(lead < 2e-2, "{}: token {written} differs, and the lead is {lead}", model.display());
                break;
            }
            ours.push(TokenId(next as u32)).unwrap();
            truth.push(TokenId(next as u32)).unwrap();
            written += 1;
        }
        println!("{}: {written} tokens alike", model.display());
        assert!(written >= 20, "{}: only {written} tokens", model.display());
    }
}

/// Conversations of different lengths go on together, one of them a fork, as each would alone.
#[test]
fn conversations_go_on_together() {
    let Some(options) = on_gpu(Precision::Fast) else { return };
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
        for step in 0..at_most(3, 1) as u32 {
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

/// Prompts of linear attention are computed in chunks, which need not be whole, and cut where a state is kept. Token by token
/// and with `exact` it is the recurrence.
#[test]
fn linear_attention_in_chunks_is_the_recurrence() {
    let Some(on_gpu) = on_gpu(Precision::Fast) else { return };
    for family in ["qwen3next", "qwen35moe"] {
        let [file, _] = containers(family);
        let engines = [on_gpu.clone(), options(Precision::Fast)].map(|o| Engine::open(&file, &o).unwrap());
        for length in [70, 131, 190] {
            let tokens = random_tokens(length, 50, length as u64);
            let [ours, truth] = [0, 1].map(|i: usize| {
                let mut session = engines[i].session();
                session.extend(&tokens[..length - 3]).unwrap();
                // What comes next begins with the state.
                session.extend(&tokens).unwrap();
                session.logits().to_vec()
            });
            let error = relative_error(&ours, &truth);
            println!("{family}, {length} tokens: {error:.1e}");
            assert!(error < 1e-4, "{family}, {length} tokens: {error}");
        }
    }
}

/// A conversation goes on where another device saved it.
#[test]
fn snapshots_move_between_devices() {
    let Some(on_gpu) = on_gpu(Precision::Fast) else { return };
    let folder = tempfile::tempdir().unwrap();
    for family in KEEPING {
        let [file, _] = containers(family);
        let engines = [on_gpu.clone(), options(Precision::Fast)].map(|o| Engine::open(&file, &o).unwrap());
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

/// What one thread copies while another one records what it computes is no part of that.
#[test]
fn conversations_are_saved_and_loaded_while_others_compute() {
    let Some(options) = on_gpu(Precision::Fast) else { return };
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
        // Also where an assertion fails.
        let _guard = Finally(|| done.store(true, Ordering::Relaxed));
        // Each number of tokens is recorded anew, and becomes a graph when it comes again.
        for count in 1..24 {
            let mut twice = [(); 2].map(|()| engine.session());
            for session in &mut twice {
                session.extend(&random_tokens(count, 50, 2)).unwrap();
            }
            assert_eq!(twice[0].logits(), twice[1].logits(), "{count} tokens");
        }
    });
}

/// Does something at the end, however that comes.
struct Finally<F: Fn()>(F);

impl<F: Fn()> Drop for Finally<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Going back, and going on from there, with windows and recurrent states.
#[test]
fn a_conversation_goes_back() {
    let Some(options) = on_gpu(Precision::Fast) else { return };
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

/// What is planned is what is allocated, and a budget of so much is enough.
#[test]
fn the_plan_is_kept() {
    if gpu().is_none() {
        return;
    }
    for family in KEEPING {
        let [file, _] = containers(family);
        let open = |memory| {
            let gpu = std::sync::Arc::new(forebay_cuda::Cuda::open(0, memory).unwrap());
            let options = Options { device: Some(gpu.clone()), ..options(Precision::Fast) };
            (Engine::open(&file, &options).unwrap(), gpu)
        };
        let (engine, _) = open(None);
        let planned = engine.plan().device.clone().unwrap();
        drop(engine);
        // As much as is planned and not a byte more.
        let (engine, gpu) = open(Some(planned.total()));
        let used = |purposes: &[&str]| -> u64 {
            gpu.used().iter().filter(|(what, _)| purposes.contains(what)).map(|(_, bytes)| bytes).sum()
        };
        let (weights, expected) = (used(&["dense weights", "experts"]), planned.dense + planned.slot_bytes);
        assert!(weights >= expected, "{family}: {weights} of {expected}");
        // A little more than planned, as each plane of a matrix ends with a few bytes that nobody writes.
        assert!(weights <= expected + (1 << 20), "{family}: {weights} of {expected}");
        let tokens = random_tokens(engine.context().min(300), 50, 3);
        let mut session = engine.session();
        session.extend(&tokens[..tokens.len() - 5]).unwrap();
        for &token in &tokens[tokens.len() - 5..] {
            let mut turns = [Turn { session: &mut session, tokens: &[token], logits: true, marks: &[] }];
            let mut step = engine.step(&mut turns, &Cancel::default()).unwrap();
            step.next_row().unwrap().unwrap().1.best().unwrap();
            step.finish().unwrap();
        }
        let scratch = used(&["buffers", "scratch", "the lists of a batch"]);
        assert!(scratch <= planned.scratch, "{family}: {scratch} of {}", planned.scratch);
        let all: u64 = gpu.used().iter().map(|(_, bytes)| bytes).sum();
        println!("{family}: {all} of {}: {:?}", planned.total(), gpu.used());
        assert!(all <= planned.total());
        // All of it comes back.
        drop((session, engine));
        assert_eq!(used(&["dense weights", "experts", "buffers", "scratch", "the lists of a batch"]), 0);
    }
}

/// What does not fit is refused, and the next model is none the worse for it.
#[test]
fn too_little_memory_is_an_error() {
    if gpu().is_none() {
        return;
    }
    let device = std::sync::Arc::new(forebay_cuda::Cuda::open(0, Some(1 << 20)).unwrap());
    let refused = Options { device: Some(device), ..options(Precision::Fast) };
    let Err(error) = Engine::open(&demo_model(), &refused) else { panic!("a megabyte cannot hold it") };
    assert!(error.to_string().contains("memory limit"), "{error}");
    assert!(Engine::open(&demo_model(), &on_gpu(Precision::Fast).unwrap()).is_ok());
}
