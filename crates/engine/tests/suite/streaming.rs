//! The memory budget changes speed and never bits: neither how many experts fit, nor how they are read.

use std::path::Path;

use forebay_engine::internals::experts::IoMethod;
use forebay_engine::internals::experts::policy::PolicyKind;
use forebay_engine::internals::format::ModelFile;
use forebay_engine::internals::models::describe;
use forebay_engine::plan::ExpertMemory;
use forebay_engine::{Engine, Error, Options, Precision, TokenId};
use forebay_testing::assert_same_bits;

use crate::common::models::{MIXTURES, containers, data, demo_model, logits, random_tokens};

/// The smallest accepted limit for experts.
fn least_expert_memory(model: &Path) -> ExpertMemory {
    let options = Options::default().expert_memory(ExpertMemory::Bytes(1));
    match Engine::open(model, &options) {
        Err(Error::Budget { need, .. }) => ExpertMemory::Bytes(need),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("a byte is enough for all experts"),
    }
}

/// The logits of a prompt in one chunk and in pieces, then of single tokens. Returns the number of misses, too.
fn run(model: &Path, options: &Options, tokens: &[TokenId]) -> (Vec<f32>, u64) {
    let mut all = logits(model, options, tokens);
    let engine = Engine::open(model, options).unwrap();
    let mut session = engine.session();
    session.extend(&tokens[..tokens.len() / 2]).unwrap();
    for &token in &tokens[tokens.len() / 2..] {
        session.push(token).unwrap();
        all.extend_from_slice(session.logits());
    }
    (all, engine.meters().misses)
}

/// Compares combinations of how much is in memory, how it is read and by how many threads it is computed.
fn compare(model: &Path, tokens: &[TokenId], precision: Precision, percents: [f64; 3]) {
    let budgets = percents.map(ExpertMemory::Percent).into_iter().chain([least_expert_memory(model)]);
    let resident = Options::default().precision(precision).threads(2);
    let (expected, misses) = run(model, &resident, tokens);
    assert_eq!(misses, 0, "everything fits");
    let mut policies = PolicyKind::ALL.into_iter().cycle();
    for budget in budgets {
        for io in [IoMethod::Auto, IoMethod::Pool] {
            for (prefetch, threads) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
                let options = resident
                    .clone()
                    .expert_memory(budget)
                    .io(io)
                    .prefetch(prefetch)
                    .threads(threads)
                    .policy(policies.next().expect("the iterator cycles"));
                let (streamed, misses) = run(model, &options, tokens);
                assert_eq!(misses > 0, budget != ExpertMemory::Percent(100.0), "{budget:?}");
                let what = format!("{precision:?}, {budget:?}, {io}, prefetch {prefetch}, {threads} threads");
                assert_same_bits(&streamed, &expected, &what);
            }
        }
    }
}

#[test]
fn the_budget_changes_no_bit_of_the_tiny_model() {
    for precision in [Precision::Fast, Precision::Exact] {
        compare(&data("golden/qwen3moe.gguf"), &random_tokens(40, 160, 11), precision, [100.0, 50.0, 25.0]);
    }
}

#[test]
fn the_minimum_of_memory_changes_no_bit_of_any_family() {
    let tokens = random_tokens(24, 512, 16);
    for model in MIXTURES.iter().copied().flat_map(containers) {
        let least = Some(least_expert_memory(&model));
        for (precision, prefetch) in [(Precision::Fast, true), (Precision::Exact, false)] {
            let resident = Options::default().precision(precision).threads(2);
            let (expected, misses) = run(&model, &resident, &tokens);
            assert_eq!(misses, 0, "everything fits");
            let (streamed, misses) = run(&model, &resident.expert_memory(least).prefetch(prefetch), &tokens);
            assert!(misses > 0, "{}", model.display());
            assert_same_bits(&streamed, &expected, &format!("{}, {precision:?}", model.display()));
        }
    }
}

#[test]
fn the_budget_changes_no_bit_of_the_demo_model() {
    compare(&demo_model(), &random_tokens(24, 4096, 12), Precision::Fast, [100.0, 50.0, 25.0]);
}

#[test]
fn a_mapped_file_gives_the_same_bits() {
    let (model, tokens) = (data("golden/qwen3moe.gguf"), random_tokens(40, 160, 11));
    let (expected, _) = run(&model, &Options::default(), &tokens);
    let budget = Some(ExpertMemory::Percent(50.0));
    let mapped = Options::default().expert_memory(budget).io(IoMethod::Mmap);
    assert_same_bits(&run(&model, &mapped, &tokens).0, &expected, "mmap");
}

/// Most prefetches of a trained model must be used; otherwise they would only delay other reads.
#[test]
fn most_prefetched_experts_are_used() {
    let options = Options::default().expert_memory(ExpertMemory::Percent(50.0));
    let meters = |options: &Options| {
        let engine = Engine::open(&demo_model(), options).unwrap();
        let story = "Once upon a time there was a little boy named Tom. Tom had a red ball, and he loved to play with it.";
        let tokens = engine.tokenizer().encode(story, Default::default()).unwrap();
        let mut session = engine.session();
        for token in tokens {
            session.push(token).unwrap();
        }
        engine.meters()
    };
    let ahead = meters(&options);
    println!("{} of {} prefetched experts were used", ahead.prefetch_used, ahead.prefetches);
    assert!(ahead.prefetches > 0 && 10 * ahead.prefetch_used >= 7 * ahead.prefetches, "{ahead:?}");
    assert_eq!(meters(&options.prefetch(false)).prefetches, 0);
}

/// A mixture's router predicts the experts of the next one, also if the layer between them has none.
#[test]
fn experts_beyond_a_layer_without_any_are_prefetched() {
    let model = data("golden/nemotron_h_moe.gguf");
    let options = Options::default().expert_memory(least_expert_memory(&model)).threads(1);
    let engine = Engine::open(&model, &options).unwrap();
    let mut session = engine.session();
    for token in random_tokens(24, 512, 3) {
        session.push(token).unwrap();
    }
    let meters = engine.meters();
    assert!(meters.prefetches > 0, "{meters:?}");
}

/// The file is truncated during a conversation and then restored.
#[test]
fn a_truncated_file_ends_the_answer_but_not_the_engine() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shrinking.gguf");
    let whole = std::fs::read(demo_model()).unwrap();
    let tokens = random_tokens(40, 4096, 17);
    for io in [IoMethod::Auto, IoMethod::Pool] {
        std::fs::write(&path, &whole).unwrap();
        let options = Options::default().expert_memory(ExpertMemory::Percent(25.0)).io(io);
        let engine = Engine::open(&path, &options).unwrap();
        let mut session = engine.session();
        session.extend(&tokens[..8]).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(whole.len() as u64 / 4).unwrap();
        let error = tokens[8..].iter().find_map(|&token| session.push(token).err());
        let message = error.expect("most experts are gone").to_string();
        assert!(message.contains("shrinking.gguf") && message.contains("offset"), "{io}: {message}");

        std::fs::write(&path, &whole).unwrap();
        session.extend(&tokens).unwrap();
        let mut other = engine.session();
        other.extend(&tokens).unwrap();
        assert_same_bits(session.logits(), other.logits(), "after the fault");
    }
}

/// An engine reads the file that it opened, even if the name later refers to another file.
#[test]
fn a_file_that_is_replaced_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::copy(demo_model(), &path).unwrap();
    let tokens = random_tokens(40, 4096, 18);
    let expected = logits(&demo_model(), &Options::default(), &tokens);
    let options = Options::default().expert_memory(ExpertMemory::Percent(25.0));
    let engine = Engine::open(&path, &options).unwrap();
    let other = folder.path().join("other");
    std::fs::write(&other, "something else").unwrap();
    std::fs::rename(&other, &path).unwrap();
    let mut session = engine.session();
    session.extend(&tokens).unwrap();
    assert_same_bits(session.logits(), &expected[expected.len() - engine.vocab_size()..], "replaced");
}

/// Experts of three, six and nine ranges, the shortest of a few bytes, and of four ranges that gate and up share.
#[test]
fn the_budget_changes_no_bit_of_models_in_folders() {
    for (folder, ranges) in [
        ("golden/qwen3moe", 3),
        ("golden/qwen3moe-fp8", 6),
        ("golden/qwen3moe-mlx", 9),
        ("golden/gpt_oss-mxfp4", 4),
    ] {
        let folder = data(folder);
        let blueprint = describe(&ModelFile::open(&folder).unwrap()).unwrap();
        let layers = blueprint.experts.iter().flatten();
        assert!(layers.flat_map(|layer| &layer.experts).all(|expert| expert.len() == ranges));
        // If all layers differ, each needs slots of its own for a token.
        for precision in [Precision::Fast, Precision::Exact] {
            compare(&folder, &random_tokens(24, 160, 15), precision, [100.0, 50.0, 40.0]);
        }
    }
}

#[test]
fn a_prompt_reads_no_expert_twice() {
    let options = Options::default().expert_memory(ExpertMemory::Percent(25.0));
    let engine = Engine::open(&demo_model(), &options).unwrap();
    engine.session().extend(&random_tokens(400, 4096, 13)).unwrap();
    let meters = engine.meters();
    assert!(engine.plan().chunk >= 400, "the prompt is one chunk");
    // No slot was used before, so every expert of the prompt was read, and none twice.
    assert!(meters.hits == 0 && meters.misses > 0);
    assert_eq!(meters.bytes_read, meters.bytes_used);
}

#[test]
fn hot_experts_are_loaded_at_the_next_start() {
    let folder = tempfile::tempdir().unwrap();
    let options =
        Options::default().expert_memory(ExpertMemory::Percent(30.0)).heat(Some(folder.path().to_owned()));
    let tokens = random_tokens(60, 4096, 14);
    let hits = || {
        let engine = Engine::open(&demo_model(), &options).unwrap();
        let mut session = engine.session();
        for &token in &tokens[..20] {
            session.push(token).unwrap();
        }
        engine.meters().hits
    };
    let cold = hits();
    let warm = hits();
    assert!(warm > cold, "{warm} hits after {cold}");
}
