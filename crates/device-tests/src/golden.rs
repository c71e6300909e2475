//! Logits on a device, compared with other programs and with the CPU.

use forebay_engine::internals::experts::Device;
use forebay_engine::{Engine, Precision, TokenId};
use forebay_testing::{Need, relative_error, skipped};

use crate::device::{MEMORY_LIMIT, TestDevice, at_most, on, open, with};
use crate::models::{
    DEMO_LOGITS, Reference, assert_close_by_default, containers, data, demo_model, distance, logits, options,
    random_tokens, tiny_models, trained,
};

pub fn exact_logits_of_the_tiny_models_equal_those_of_others<D: TestDevice>() {
    let options = on::<D>(Precision::Exact);
    for (model, reference) in tiny_models() {
        let error = distance(&model, &options, &Reference::read(&reference));
        println!("{}: {error:.2e}", model.display());
        assert!(error < 1e-3, "{}: relative error {error}", model.display());
    }
}

pub fn logits_of_quantised_folders_equal_those_of_others<D: TestDevice>() {
    for name in ["qwen3moe-mlx", "qwen3moe-fp8"] {
        let options = on::<D>(Precision::Exact);
        let model = data(&format!("golden/{name}"));
        let error =
            distance(&model, &options, &Reference::read(&format!("golden/{name}.logits.safetensors")));
        println!("{name}: {error:.2e}");
        assert!(error < 1e-3, "{name}: relative error {error}");
        assert_close_by_default(&model, &options.precision(Precision::Fast));
    }
}

pub fn logits_of_the_tiny_models_are_close_by_default<D: TestDevice>() {
    let options = on::<D>(Precision::Fast);
    for (model, _) in tiny_models() {
        assert_close_by_default(&model, &options);
    }
}

/// Single tokens after a prompt use other kernels than the prompt. They go on past the ends of windows and chunks.
pub fn logits_of_single_tokens_equal_those_of_others<D: TestDevice>() {
    const PROMPT: usize = 58;
    for precision in [Precision::Exact, Precision::Fast] {
        let options = on::<D>(precision);
        for (model, reference) in tiny_models().into_iter().filter(|(model, _)| model.is_dir()) {
            let Reference { tokens, logits } = Reference::read(&reference);
            let engine = Engine::open(&model, &options).unwrap();
            let vocab = engine.vocab_size();
            let rows: Vec<&[f32]> = logits.chunks_exact(vocab).collect();
            // The reference may be of the last positions only.
            let first = tokens.len() - rows.len();
            let start = if tokens.len() > PROMPT { PROMPT } else { tokens.len() / 2 }.max(first);
            let mut session = engine.session();
            session.extend(&tokens[..start]).unwrap();
            let steps = start..tokens.len().min(start + at_most::<D>(64, 10));
            let mut error = |position: usize| {
                session.push(tokens[position]).unwrap();
                relative_error(session.logits(), rows[position - first])
            };
            let errors: Vec<f64> = steps.map(&mut error).collect();
            let tolerance = if precision == Precision::Exact { 1e-3 } else { 1e-2 };
            let close = errors.iter().filter(|&&error| error < tolerance).count();
            println!("{}, {precision:?}: {close} of {} within {tolerance}", model.display(), errors.len());
            // After rounding, routers sometimes choose another expert.
            let least = if precision == Precision::Exact { errors.len() } else { errors.len() * 3 / 4 };
            assert!(close >= least, "{}, {precision:?}: {errors:?}", model.display());
        }
    }
}

pub fn logits_of_the_demo_model_equal_those_of_transformers<D: TestDevice>() {
    let reference = Reference::read(DEMO_LOGITS);
    for (precision, tolerance) in [(Precision::Exact, 1e-3), (Precision::Fast, 1e-2)] {
        let options = on::<D>(precision);
        let error = distance(&demo_model(), &options, &reference);
        println!("{precision:?}: {error:.2e}");
        assert!(error < tolerance, "{precision:?}: relative error {error}");
    }
}

/// A text like those that the trained models know, longer than a chunk of linear attention. On random tokens, trained
/// models are as unstable as random ones.
const STORY: &str = "Once upon a time there was a little boy named Tom. Tom had a red ball, and he loved to play with it in \
    the garden. One day the ball rolled under the big tree, and Tom could not find it. He looked and looked, but it was gone. \
    Then he saw a small brown dog. The dog had the ball in its mouth! Tom was happy, and he said, \"Thank you, dog!\" The dog \
    ran around him and barked. They played until the sun went down. Tom's mom called him for dinner. \"Can the dog come, too?\" \
    he asked. His mom smiled and said yes. From that day on, Tom and the dog were best friends.";

pub fn logits_of_trained_models_equal_the_processors<D: TestDevice>() {
    if D::is_emulated() {
        return skipped(Need::RealGpu, "on the emulator the demo model stands for the trained ones");
    }
    let on_device = on::<D>(Precision::Fast);
    let families = ["tales-qwen35moe", "tales-deepseek_v3", "tales-qwen3moe"];
    let quantised =
        families.iter().flat_map(|name| [format!("{name}-Q4_K_M.gguf"), format!("{name}-mlx-4bit")]);
    // Includes the unquantised weights, where they are small enough to be in the repository.
    let plain = families[..2].iter().map(|name| name.to_string());
    for model in quantised.chain(plain).filter_map(|name| trained(&name)) {
        let exact = options(Precision::Exact);
        let tokens =
            Engine::open(&model, &exact).unwrap().tokenizer().encode(STORY, Default::default()).unwrap();
        assert!(tokens.len() > 100);
        let [ours, truth] = [&on_device, &exact].map(|options| logits(&model, options, &tokens));
        let error = relative_error(&ours, &truth);
        println!("{}: {error:.2e}", model.display());
        assert!(error < 1e-2, "{}: relative error {error}", model.display());
    }
}

fn likeliest(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap()
}

/// How far the likeliest token's logit is above the next one's, relative to the norm of all logits.
fn lead(logits: &[f32]) -> f32 {
    let best = likeliest(logits);
    let next = (0..logits.len()).filter(|&i| i != best).map(|i| logits[i]).fold(f32::NEG_INFINITY, f32::max);
    let spread = (logits.iter().map(|x| x * x).sum::<f32>() / logits.len() as f32).sqrt();
    (logits[best] - next) / spread
}

pub fn greedy_text_is_the_processors_until_two_tokens_are_as_likely<D: TestDevice>() {
    let on_device = on::<D>(Precision::Fast);
    let models = [
        Some(demo_model()),
        trained("tales-qwen35moe-Q4_K_M.gguf"),
        trained("tales-deepseek_v3-Q4_K_M.gguf"),
    ];
    for model in models.into_iter().flatten().take(at_most::<D>(3, 1)) {
        let engines =
            [on_device.clone(), options(Precision::Exact)].map(|o| Engine::open(&model, &o).unwrap());
        let prompt = engines[0].tokenizer().encode("Once upon a time", Default::default()).unwrap();
        let [mut ours, mut truth] = engines.map(|engine| {
            let mut session = engine.session();
            session.extend(&prompt).unwrap();
            session
        });
        let mut written = 0;
        for _ in 0..at_most::<D>(200, 30) {
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

/// A prompt's linear attention is computed in chunks, which may be partial and are cut where a state is kept. Token by
/// token, and with `exact`, it is the recurrence.
pub fn linear_attention_in_chunks_is_the_recurrence<D: TestDevice>() {
    let on_device = on::<D>(Precision::Fast);
    for family in ["qwen3next", "qwen35moe"] {
        let [file, _] = containers(family);
        let engines = [on_device.clone(), options(Precision::Fast)].map(|o| Engine::open(&file, &o).unwrap());
        for length in [70, 131, 190] {
            let tokens = random_tokens(length, 50, length as u64);
            let [ours, truth] = [0, 1].map(|i: usize| {
                let mut session = engines[i].session();
                session.extend(&tokens[..length - 3]).unwrap();
                // The next token starts from the state.
                session.extend(&tokens).unwrap();
                session.logits().to_vec()
            });
            let error = relative_error(&ours, &truth);
            println!("{family}, {length} tokens: {error:.1e}");
            assert!(error < D::RECURRENCE, "{family}, {length} tokens: {error}");
        }
    }
}

/// A model that does not fit is refused, and the next model loads as usual.
pub fn too_little_memory_is_an_error<D: TestDevice>() {
    let device = open::<D>(Some(1 << 20));
    let shared = device.shares_memory();
    let refused = with(device, Precision::Fast);
    // One limit counts memory that a device shares with the processor.
    let (refused, limit) =
        if shared { (refused.memory(1 << 20), "Options::memory") } else { (refused, MEMORY_LIMIT) };
    let Err(error) = Engine::open(&demo_model(), &refused) else { panic!("a megabyte cannot hold it") };
    assert!(error.to_string().contains(limit), "{error}");
    assert!(Engine::open(&demo_model(), &on::<D>(Precision::Fast)).is_ok());
}
