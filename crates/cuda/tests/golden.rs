//! Logits on a GPU against code we did not write, and against the processor.

mod common;

use common::gpu;
use common::models::{
    DEMO_LOGITS, KEEPING, Reference, containers, demo_model, distance, logits, options, random_tokens,
    relative_error, tiny_models, trained,
};
use forebay_engine::{Cancel, Engine, Options, Precision, Session, TokenId, Turn};

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

/// The tiny models' weights are random, and so their routers hesitate: here and there two experts are as good as each
/// other to within the rounding of keys and values to halves, and another one is chosen. Such a token's logits, and to
/// a lesser degree those after it, are others; most are close.
#[test]
fn fast_logits_of_the_tiny_models_are_close_to_those_of_others() {
    let Some(options) = on_gpu(Precision::Fast) else { return };
    let mut wrong = Vec::new();
    for (model, reference) in tiny_models() {
        let reference = Reference::read(&reference);
        let ours = logits(&model, &options, &reference.tokens);
        let vocab = ours.len() / reference.tokens.len();
        let ours = &ours[ours.len() - reference.logits.len()..];
        let positions = ours.chunks_exact(vocab).zip(reference.logits.chunks_exact(vocab));
        let mut errors: Vec<f64> = positions.map(|(ours, truth)| relative_error(ours, truth)).collect();
        errors.sort_by(f64::total_cmp);
        let close = errors.iter().filter(|&&error| error < 1e-2).count();
        let median = errors[errors.len() / 2];
        println!("{}: {close} of {} within 1e-2, median {median:.2e}", model.display(), errors.len());
        if !(median < 1e-2 && errors.iter().all(|&error| error < 0.5)) {
            wrong.push(model);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
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

#[test]
fn logits_of_trained_models_equal_the_processors() {
    for name in ["tales-qwen35moe", "tales-deepseek_v3", "tales-qwen3moe"] {
        for model in [format!("{name}-Q4_K_M.gguf"), format!("{name}-mlx-4bit")] {
            let Some(on_gpu) = on_gpu(Precision::Fast) else { return };
            let Some(model) = trained(&model) else { continue };
            let tokens = random_tokens(150, 1000, 7);
            let error = relative_error(
                &logits(&model, &on_gpu, &tokens),
                &logits(&model, &options(Precision::Exact), &tokens),
            );
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
    for model in models.into_iter().flatten() {
        let engines = [on_gpu.clone(), options(Precision::Exact)].map(|o| Engine::open(&model, &o).unwrap());
        let prompt = engines[0].tokenizer().encode("Once upon a time", Default::default()).unwrap();
        let [mut ours, mut truth] = engines.map(|engine| {
            let mut session = engine.session();
            session.extend(&prompt).unwrap();
            session
        });
        let mut written = 0;
        for _ in 0..200 {
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
        for step in 0..3u32 {
            let tokens: Vec<[TokenId; 1]> = (0..6).map(|i| [TokenId((7 * i + step) % 50)]).collect();
            let mut logits = vec![Vec::new(); 6];
            let mut turns: Vec<Turn<'_>> = together
                .iter_mut()
                .zip(&tokens)
                .map(|(session, tokens)| Turn { session, tokens, logits: true, marks: &[] })
                .collect();
            engine.step(&mut turns, &Cancel::default(), |i, row| logits[i] = row.to_vec()).unwrap();
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

/// What does not fit is refused, and the next model is none the worse for it.
#[test]
fn too_little_memory_is_an_error() {
    if gpu().is_none() {
        return;
    }
    let device = std::sync::Arc::new(forebay_cuda::Cuda::open(0, Some(1 << 20)).unwrap());
    let refused = Options { device: Some(device), ..options(Precision::Fast) };
    let Err(error) = Engine::open(&demo_model(), &refused) else { panic!("a megabyte cannot hold it") };
    assert!(error.to_string().contains("--vram"), "{error}");
    assert!(Engine::open(&demo_model(), &on_gpu(Precision::Fast).unwrap()).is_ok());
}
