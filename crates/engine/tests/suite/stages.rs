//! A model that is split by layers into stages gives the bits of the whole model, also when a stage is lost.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use forebay_engine::internals::format::ModelFile;
use forebay_engine::plan::ExpertMemory;
use forebay_engine::{
    Answer, Cancel, Crowd, CrowdOptions, Engine, Error, Lost, Meters, Options, Precision, PrefixOptions,
    Prospect, Request, Session, Stage, StageHost, StageSession, StageTurn, TokenId, Transport,
};
use forebay_testing::assert_same_bits;

use crate::common::models::{KEEPING, containers, data, demo_model, options, random_tokens, tiny_models};
use crate::common::served::{add, alone, assert_same, finish, request};
use crate::common::slots::machine;

/// The ranges of this many stages.
fn split(layers: usize, stages: usize) -> Vec<Range<usize>> {
    (0..stages).map(|i| i * layers / stages..(i + 1) * layers / stages).collect()
}

fn layers_of(model: &Path) -> usize {
    Prospect::new(model, &Options::default()).unwrap().span().all
}

/// The options with the smallest memory for the experts of these layers.
fn least(model: &Path, options: &Options) -> Options {
    let tiny = options.clone().expert_memory(ExpertMemory::Bytes(1));
    match Prospect::new(model, &tiny) {
        Err(Error::Budget { need, .. }) => options.clone().expert_memory(ExpertMemory::Bytes(need)),
        Err(other) => panic!("{other}"),
        // These layers have no experts.
        Ok(_) => options.clone(),
    }
}

/// The model in this many stages, in this process.
fn staged(model: &Path, options: &Options, stages: usize, streams: bool) -> Engine {
    let options_of = |layers: &Range<usize>| {
        let options = options.clone().layers(layers.clone());
        if streams { least(model, &options) } else { options }
    };
    let mut ranges = split(layers_of(model), stages);
    let last = ranges.pop().unwrap();
    let hosts = ranges.iter().map(|layers| -> Box<dyn Transport> {
        Box::new(Stage::open(model, &options_of(layers)).unwrap().host())
    });
    Engine::after(hosts.collect(), model, &options_of(&last)).unwrap()
}

/// The logits of every token of a text: of the first half as a prompt, of the others token by token.
fn logits(engine: &Engine, tokens: &[TokenId]) -> Vec<f32> {
    let mut session = engine.session();
    let (mut all, (prompt, answer)) = (Vec::new(), tokens.split_at(tokens.len() / 2));
    let mut rows = engine.all_logits(&mut session, prompt).unwrap();
    while let Some((_, row)) = rows.next_row().unwrap() {
        all.extend_from_slice(row);
    }
    drop(rows);
    for &token in answer {
        session.push(token).unwrap();
        all.extend_from_slice(session.logits());
    }
    all
}

#[test]
fn stages_change_no_bit_of_any_family() {
    let tokens = random_tokens(40, 160, 31);
    let (mut compared, mut in_three) = (0, 0);
    for (model, _) in tiny_models() {
        for precision in [Precision::Fast, Precision::Exact] {
            // The prompt takes three passes.
            let options = options(precision).chunk(7);
            let whole = logits(&Engine::open(&model, &options).unwrap(), &tokens);
            let layers = layers_of(&model);
            for stages in 2..=layers.min(3) {
                for streams in [false, true] {
                    let engine = staged(&model, &options, stages, streams);
                    let what =
                        format!("{}, {precision:?}, {stages} stages, streams {streams}", model.display());
                    assert_same_bits(&logits(&engine, &tokens), &whole, &what);
                    compared += 1;
                    in_three += usize::from(stages == 3);
                }
            }
        }
    }
    assert!(compared > 200 && in_three > 80, "{compared}, {in_three} in three stages");
}

#[test]
fn stages_change_no_bit_of_the_demo_model() {
    let tokens = random_tokens(40, 4096, 32);
    let options = options(Precision::Fast);
    let whole = logits(&Engine::open(&demo_model(), &options).unwrap(), &tokens);
    for stages in [2, 3] {
        let engine = staged(&demo_model(), &options, stages, true);
        assert_same_bits(&logits(&engine, &tokens), &whole, &format!("{stages} stages"));
        assert!(engine.meters().misses > 0, "it streams");
    }
}

/// The plan of a stage counts only what the stage has. A model whose output matrix is its embedding table has that
/// table at both ends.
#[test]
fn the_plans_of_the_stages_add_up_to_that_of_the_model() {
    let plan = |model: &Path, layers: Option<Range<usize>>| {
        let prospect = Prospect::new(model, &options(Precision::Fast).layers(layers)).unwrap();
        (prospect.plan().clone(), prospect.traffic())
    };
    let mut tied = 0;
    for (model, _) in tiny_models() {
        let (whole, traffic) = plan(&model, None);
        let parts: Vec<_> =
            split(layers_of(&model), 2).into_iter().map(|part| plan(&model, Some(part))).collect();
        let what = model.display();
        // Slots for fewer experts need less padding.
        assert!(parts.iter().map(|(plan, _)| plan.experts).sum::<u64>() <= whole.experts, "{what}");
        let experts = parts.iter().map(|(plan, _)| plan.expert_count).sum::<usize>();
        assert_eq!(experts, whole.expert_count, "{what}");
        assert_eq!(parts.iter().map(|(plan, _)| plan.kv).sum::<u64>(), whole.kv, "{what}");
        assert_eq!(parts.iter().map(|(_, traffic)| traffic.experts).sum::<u64>(), traffic.experts, "{what}");
        // Divisors of the rotation are a few bytes that all stages have.
        let more = parts.iter().map(|(_, traffic)| traffic.dense).sum::<u64>() - traffic.dense;
        assert!(more < 256, "{what}: {more}");
        let file = ModelFile::open(&model).unwrap();
        let table = |name: &str| {
            let weight = file.weight(name).unwrap()?;
            Some(weight.planes.iter().flatten().map(|plane| plane.len).sum::<u64>())
        };
        let embeddings = [
            "token_embd.weight",
            "model.embed_tokens.weight",
            "model.word_embeddings.weight",
            "model.embeddings.weight",
        ];
        let embeddings = embeddings.into_iter().find_map(table).unwrap();
        let is_tied = table("output.weight").or_else(|| table("lm_head.weight")).is_none();
        let twice = parts.iter().map(|(plan, _)| plan.dense).sum::<u64>() - whole.dense;
        let expected = if is_tied { embeddings } else { 0 };
        assert!((expected..expected + 256).contains(&twice), "{what}: {twice}, not {expected}");
        tied += usize::from(is_tied);
    }
    assert!(tied > 0, "some models have one table for both");
}

/// A copy of a model in which the weights of all layers but these are overwritten, and the ends that others have.
fn only(model: &Path, layers: &Range<usize>, all: usize, folder: &Path) -> PathBuf {
    let path = folder.join(format!("{}-{}.gguf", layers.start, layers.end));
    std::fs::copy(model, &path).unwrap();
    let mut copy = File::options().write(true).open(&path).unwrap();
    let mut overwritten = 0;
    for tensor in &ModelFile::open(model).unwrap().tensors {
        let layer = tensor.name.strip_prefix("blk.").and_then(|name| name.split('.').next()?.parse().ok());
        let keep = match layer {
            Some(layer) => layers.contains(&layer),
            None if tensor.name.starts_with("token_embd") => layers.start == 0,
            None => layers.end == all,
        };
        if !keep {
            copy.seek(SeekFrom::Start(tensor.offset)).unwrap();
            copy.write_all(&vec![0xff; tensor.len as usize]).unwrap();
            overwritten += 1;
        }
    }
    assert!(overwritten > 10);
    path
}

#[test]
fn a_stage_reads_only_its_own_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = random_tokens(20, 160, 33);
    for family in ["qwen3moe", "deepseek_v3", "gpt_oss", "qwen35moe"] {
        let [model, _] = containers(family);
        let all = layers_of(&model);
        let whole = logits(&Engine::open(&model, &options(Precision::Fast)).unwrap(), &tokens);
        let mut ranges = split(all, 3);
        let last = ranges.pop().unwrap();
        let mut stages = Vec::new();
        for layers in &ranges {
            let path = only(&model, layers, all, folder.path());
            let options = options(Precision::Fast).layers(layers.clone());
            stages.push(Stage::open(&path, &least(&path, &options)).unwrap());
        }
        let hosts = stages.iter().map(|stage| -> Box<dyn Transport> { Box::new(stage.host()) }).collect();
        let path = only(&model, &last, all, folder.path());
        let engine = Engine::after(hosts, &path, &options(Precision::Fast)).unwrap();
        assert_same_bits(&logits(&engine, &tokens), &whole, family);
        for stage in stages {
            let Meters { bytes_read, bytes_used, .. } = stage.meters();
            assert!(stage.plan().experts == 0 || bytes_read > 0, "{family}: {}", stage.span());
            assert!(bytes_read <= bytes_used + stage.plan().slot_bytes, "{family}: {}", stage.span());
        }
    }
}

#[test]
fn a_range_that_the_model_does_not_have_is_refused_by_name() {
    let model = data("golden/qwen3moe.gguf");
    let open = |layers: Range<usize>| {
        let options = Options::default().layers(layers);
        let error = Stage::open(&model, &options).map(drop).unwrap_err();
        assert_eq!(
            error.to_string(),
            Prospect::new(&model, &options)
                .and(Stage::open(&model, &options))
                .map(drop)
                .unwrap_err()
                .to_string()
        );
        error.to_string()
    };
    assert_eq!(open(1..1), "Options::layers is 1..1, which has no layers; a stage needs at least one");
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = open(2..1);
    assert_eq!(reversed, "Options::layers is 2..1, which has no layers; a stage needs at least one");
    assert_eq!(open(1..4), "Options::layers is 1..4, but the model has only layers 0..3");
    let last = open(1..3);
    assert!(last.contains("layers 1..3 of 3") && last.contains("Engine::after"), "{last}");
    let part = Engine::open(&model, &Options::default().layers(0..2)).map(drop).unwrap_err().to_string();
    assert!(part.contains("layers 0..2 of 3") && part.contains("Stage::open"), "{part}");
    Engine::open(&model, &Options::default().layers(0..3)).unwrap();

    let stage = |layers| Stage::open(&model, &options(Precision::Fast).layers(layers)).unwrap();
    let chain = |hosts: Vec<StageHost>, options: &Options| {
        let hosts = hosts.into_iter().map(|host| -> Box<dyn Transport> { Box::new(host) });
        Engine::after(hosts.collect(), &model, options).map(drop).map_err(|error| error.to_string())
    };
    let fast = options(Precision::Fast);
    chain(vec![stage(0..1).host(), stage(1..2).host()], &fast).unwrap();
    let error = chain(vec![stage(1..2).host(), stage(0..1).host()], &fast).unwrap_err();
    assert!(error.contains("layers 1..2 of 3") && error.contains("layer 0 of 3"), "{error}");
    let error = chain(vec![], &fast).unwrap_err();
    assert!(error.contains("no stages"), "{error}");
    let error = chain(vec![stage(0..1).host()], &fast.clone().layers(2..3)).unwrap_err();
    assert!(error.contains("2..3") && error.contains("layers 1..3 of 3"), "{error}");
    let error = chain(vec![stage(0..1).host()], &options(Precision::Exact)).unwrap_err();
    assert!(error.contains("another model or precision"), "{error}");
}

/// A stage that is lost at certain calls, before or after it has done what was asked, and started again without its
/// conversations.
struct Failing {
    stage: Stage,
    host: Option<StageHost>,
    calls: usize,
    lost_at: VecDeque<usize>,
    restarts: Arc<AtomicUsize>,
}

impl Failing {
    fn new(stage: Stage, lost_at: &[usize]) -> (Failing, Arc<AtomicUsize>) {
        let restarts = Arc::new(AtomicUsize::new(0));
        let host = Some(stage.host());
        let lost_at = lost_at.iter().copied().collect();
        (Failing { stage, host, calls: 0, lost_at, restarts: restarts.clone() }, restarts)
    }
}

impl Transport for Failing {
    fn call(&mut self, message: &[u8]) -> Result<Vec<u8>, Lost> {
        self.calls += 1;
        let host = self.host.as_mut().ok_or_else(|| Lost("it is not running".into()))?;
        if self.lost_at.pop_front_if(|call| *call == self.calls).is_some() {
            if self.calls.is_multiple_of(2) {
                host.handle(message);
            }
            self.host = None;
            return Err(Lost("its process was killed".into()));
        }
        Ok(host.handle(message))
    }

    fn restart(&mut self) -> Result<(), Lost> {
        self.restarts.fetch_add(1, Ordering::Relaxed);
        self.host = Some(self.stage.host());
        Ok(())
    }
}

/// A model in three stages, or in two if it has only two layers, of which the others than the last are lost at these
/// calls.
fn failing(model: &Path, options: &Options, lost_at: [&[usize]; 2]) -> (Engine, Vec<Arc<AtomicUsize>>) {
    let mut ranges = split(layers_of(model), 3);
    ranges.pop();
    let (mut transports, mut restarts) = (Vec::<Box<dyn Transport>>::new(), Vec::new());
    for (layers, lost_at) in ranges.into_iter().zip(lost_at) {
        let (failing, count) =
            Failing::new(Stage::open(model, &options.clone().layers(layers)).unwrap(), lost_at);
        transports.push(Box::new(failing));
        restarts.push(count);
    }
    (Engine::after(transports, model, options).unwrap(), restarts)
}

#[test]
fn a_stage_killed_in_the_middle_of_an_answer_changes_no_bit() {
    let tokens = random_tokens(60, 160, 34);
    let losses: [[&[usize]; 2]; 5] = [
        [&[12], &[]],
        [&[], &[13]],
        // Both at the same token, each twice, and at the first message.
        [&[10], &[10]],
        [&[1, 9, 20], &[14, 15]],
        [&[5], &[6, 30]],
    ];
    for family in KEEPING {
        let [model, _] = containers(family);
        let options = options(Precision::Fast).chunk(16);
        let whole = logits(&Engine::open(&model, &options).unwrap(), &tokens);
        for lost_at in losses {
            let (engine, restarts) = failing(&model, &options, lost_at);
            assert_same_bits(&logits(&engine, &tokens), &whole, &format!("{family}, lost at {lost_at:?}"));
            for (restarts, lost_at) in restarts.iter().zip(lost_at) {
                assert_eq!(restarts.load(Ordering::Relaxed), lost_at.len(), "{family}, {lost_at:?}");
            }
        }
    }
}

#[test]
fn an_answer_goes_on_after_its_stage_was_killed() {
    let options = options(Precision::Fast);
    let whole = Engine::open(&demo_model(), &options).unwrap();
    let prompt = whole.tokenizer().encode("Once upon a time", Default::default()).unwrap();
    let request = request(&prompt, 40, 41);
    let (engine, restarts) = failing(&demo_model(), &options, [&[20], &[11]]);
    let mut text = String::new();
    let answer = engine.session().generate(&request, &mut |event| {
        if let forebay_engine::Event::Text(more) = event {
            text.push_str(more);
        }
    });
    assert_same(&answer.unwrap(), &alone(&whole, &request), "killed");
    assert!(restarts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
}

/// Going back, going on elsewhere, forks, and batches that were cancelled after a stage had computed them.
#[test]
fn conversations_of_stages_go_back_and_fork_like_others() {
    let (story, other) = (random_tokens(90, 160, 35), random_tokens(30, 160, 36));
    for family in KEEPING {
        let [model, _] = containers(family);
        let options = options(Precision::Fast).chunk(16);
        let whole = Engine::open(&model, &options).unwrap();
        let truth = |tokens: &[TokenId]| {
            let mut session = whole.session();
            session.extend(tokens).unwrap();
            session.logits().to_vec()
        };
        let engine = staged(&model, &options, 3, false);
        let mut session = engine.session();
        for tokens in [
            &story[..80],
            &[&story[..70], &other[..]].concat(),
            &story[..65],
            &story[..],
            &story[..1],
            &other[..],
            &story[..50],
        ] {
            session.extend(tokens).unwrap();
            assert_same_bits(session.logits(), &truth(tokens), &format!("{family}, {} tokens", tokens.len()));
        }
        let mut fork = session.fork().unwrap();
        drop(std::mem::replace(&mut session, fork.fork().unwrap()));
        for (session, next) in [(&mut session, other[3]), (&mut fork, other[4])] {
            session.push(next).unwrap();
            let tokens = [&story[..50], &[next]].concat();
            assert_same_bits(session.logits(), &truth(&tokens), &format!("{family}, fork"));
        }
        let cancel = session.cancel().clone();
        cancel.cancel();
        assert!(matches!(session.push(other[5]), Err(Error::Cancelled)));
        cancel.reset();
        session.push(other[6]).unwrap();
        let tokens = [&story[..50], &[other[3], other[6]]].concat();
        assert_same_bits(session.logits(), &truth(&tokens), &format!("{family}, after a cancellation"));
    }
}

/// The last stage fails after the others have computed, so these have tokens that the conversation does not have.
#[test]
fn tokens_that_the_last_stage_did_not_compute_are_taken_back() {
    for family in KEEPING {
        let [model, _] = containers(family);
        let options = options(Precision::Fast);
        let tokens = random_tokens(20, 160, 37);
        let engine = staged(&model, &options, 2, false);
        let mut session = engine.session();
        session.extend(&tokens).unwrap();
        // The check before the first stage passes, and the one in the last stage does not.
        let asked = AtomicUsize::new(0);
        session.obey(&Cancel::when(move || asked.fetch_add(1, Ordering::Relaxed) >= 1));
        assert!(matches!(session.push(TokenId(9)), Err(Error::Cancelled)));
        session.obey(&Cancel::default());
        session.push(TokenId(8)).unwrap();
        let mut truth = Engine::open(&model, &options).unwrap().session();
        truth.extend(&[&tokens[..], &[TokenId(8)]].concat()).unwrap();
        assert_same_bits(session.logits(), truth.logits(), family);
    }
}

/// Requests of many lengths, some with the same beginning.
fn requests() -> Vec<Request> {
    let shared = random_tokens(50, 160, 1);
    let prompt = |i: usize| {
        let own = random_tokens(1 + i * 37 % 60, 160, 100 + i as u64);
        if i.is_multiple_of(3) { [&shared[..20 + i % 30], &own].concat() } else { own }
    };
    (0..10).map(|i| request(&prompt(i), 3 + i * 11 % 20, i as u64)).collect()
}

#[test]
fn a_crowd_answers_over_stages_as_over_one_engine() {
    let requests = requests();
    for family in KEEPING {
        let [model, _] = containers(family);
        let options = options(Precision::Fast).chunk(24);
        let whole = Engine::open(&model, &options).unwrap();
        let expected: Vec<Answer> = requests.iter().map(|request| alone(&whole, request)).collect();
        let losses: [[&[usize]; 2]; 2] = [[&[], &[]], [&[7, 40], &[21]]];
        for lost_at in losses {
            let (engine, restarts) = failing(&model, &options, lost_at);
            let mut options = CrowdOptions::new(4);
            options.prefixes = Some(PrefixOptions { gain: 8, ..PrefixOptions::new(&engine, None) });
            let mut crowd = Crowd::new(&engine, options);
            for round in 0..2 {
                let ears: Vec<_> = requests.iter().map(|request| add(&mut crowd, request)).collect();
                finish(&mut crowd);
                for (ear, expected) in ears.iter().zip(&expected) {
                    assert_same(&ear.answer(), expected, &format!("{family}, {lost_at:?}, round {round}"));
                }
            }
            assert!(crowd.prefix_meters().hits > 0, "{family}");
            let count: usize = restarts.iter().map(|count| count.load(Ordering::Relaxed)).sum();
            assert_eq!(count, lost_at.iter().map(|at| at.len()).sum::<usize>(), "{family}");
        }
    }
}

/// The first stage has less memory for conversations than the others. A crowd gives way to that as to its own limit.
#[test]
fn conversations_that_do_not_fit_a_stage_wait_and_lose_nothing() {
    let options = options(Precision::Fast).chunk(64);
    let first = options.clone().layers(0..4).machine(machine()).context(1024);
    let roomy = first.clone().memory(1 << 40);
    let prospect = Prospect::new(&demo_model(), &roomy).unwrap();
    let least = prospect.least_memory(&roomy).unwrap();
    let stage = Stage::open(&demo_model(), &roomy.memory(least + (1 << 20))).unwrap();
    let engine =
        Engine::after(vec![Box::new(stage.host())], &demo_model(), &options.clone().context(1024)).unwrap();
    let whole = Engine::open(&demo_model(), &options).unwrap();
    let requests: Vec<Request> =
        (0..5).map(|i| request(&random_tokens(600, 4096, 50 + i), 20 + i as usize, i)).collect();
    let mut crowd = Crowd::new(&engine, CrowdOptions::new(5));
    let ears: Vec<_> = requests.iter().map(|request| add(&mut crowd, request)).collect();
    let mut gave_way = 0;
    while !crowd.is_empty() {
        let before = crowd.running();
        crowd.step(&Cancel::default()).unwrap();
        gave_way += usize::from(crowd.waiting() > 0 && crowd.running() < before);
    }
    assert!(gave_way > 0, "memory suffices for all");
    // Otherwise requests would start again and again before there is room for them.
    assert!(gave_way <= 10, "{gave_way} times");
    for (ear, request) in ears.iter().zip(&requests) {
        assert_same(&ear.answer(), &alone(&whole, request), "with a small stage");
    }
}

/// A first stage that tells of each batch.
struct Telling(StageHost, Sender<()>);

/// A second stage in which one batch, the `at`th, waits until the first stage has got the one after it.
struct Waiting {
    host: StageHost,
    at: usize,
    batches: usize,
    told: Receiver<()>,
}

fn is_batch(message: &[u8]) -> bool {
    message.windows(7).any(|word| word == b"Forward")
}

impl Transport for Telling {
    fn call(&mut self, message: &[u8]) -> Result<Vec<u8>, Lost> {
        if is_batch(message) {
            let _ = self.1.send(());
        }
        Ok(self.0.handle(message))
    }

    fn restart(&mut self) -> Result<(), Lost> {
        Err(Lost("it is not lost".into()))
    }
}

impl Transport for Waiting {
    fn call(&mut self, message: &[u8]) -> Result<Vec<u8>, Lost> {
        self.batches += usize::from(is_batch(message));
        if is_batch(message) && self.batches == self.at {
            for batch in 1..=self.at + 1 {
                let told = self.told.recv_timeout(Duration::from_secs(60));
                told.unwrap_or_else(|_| panic!("batch {batch} is not in the first stage"));
            }
        }
        Ok(self.host.handle(message))
    }

    fn restart(&mut self) -> Result<(), Lost> {
        Err(Lost("it is not lost".into()))
    }
}

/// A model in three stages. In the second one, the `at`th batch waits until the next one is in the first stage.
fn waiting(model: &Path, options: &Options, at: usize) -> Engine {
    let ranges = split(layers_of(model), 3);
    let host = |i: usize| Stage::open(model, &options.clone().layers(ranges[i].clone())).unwrap().host();
    let (sender, told) = channel();
    let second = Waiting { host: host(1), at, batches: 0, told };
    Engine::after(vec![Box::new(Telling(host(0), sender)), Box::new(second)], model, options).unwrap()
}

#[test]
fn batches_of_different_threads_are_in_different_stages_at_once() {
    let engine = waiting(&data("golden/qwen3moe.gguf"), &options(Precision::Fast), 1);
    std::thread::scope(|scope| {
        for token in [3, 4] {
            let engine = &engine;
            scope.spawn(move || engine.session().push(TokenId(token)).unwrap());
        }
    });
}

/// The first batch is both prompts. Then each answer's token is a batch.
#[test]
fn the_answers_of_a_crowd_are_in_different_stages_at_once() {
    let model = data("golden/qwen3moe.gguf");
    let engine = waiting(&model, &options(Precision::Fast), 2);
    let whole = Engine::open(&model, &options(Precision::Fast)).unwrap();
    let mut crowd = Crowd::new(&engine, CrowdOptions::new(2));
    let requests = [42, 43].map(|seed| request(&random_tokens(9, 160, seed), 8, seed));
    let ears = requests.each_ref().map(|request| add(&mut crowd, request));
    finish(&mut crowd);
    for (ear, request) in ears.iter().zip(&requests) {
        assert_same(&ear.answer(), &alone(&whole, request), "in three stages");
    }
}

#[test]
fn what_a_stage_keeps_of_a_conversation_is_saved_and_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("part");
    let tokens = random_tokens(40, 160, 39);
    for family in KEEPING {
        let [model, _] = containers(family);
        let options = options(Precision::Fast);
        let first = Stage::open(&model, &options.clone().layers(0..1)).unwrap();
        let forward = |session: &mut StageSession, tokens: &[TokenId]| {
            first.forward(&mut [StageTurn { session, tokens, marks: &[] }], &[], &Cancel::default()).unwrap()
        };
        let mut session = first.session();
        forward(&mut session, &tokens[..30]);
        session.save(&path).unwrap();
        let next = forward(&mut session, &tokens[30..]);
        let mut loaded = StageSession::load(&first, &path).unwrap();
        assert_eq!(loaded.len(), 30);
        assert_same_bits(&forward(&mut loaded, &tokens[30..]), &next, family);
        // The last pass is taken back as a whole, even by layers that keep only their last state.
        assert_eq!(loaded.rewind(30), 30, "{family}");
        assert_same_bits(&forward(&mut loaded, &tokens[30..]), &next, family);

        let second = Stage::open(&model, &options.clone().layers(1..2)).unwrap();
        let error = StageSession::load(&second, &path).map(drop).unwrap_err().to_string();
        assert!(error.contains("layers 0..1") && error.contains("layers 1..2"), "{error}");
        let whole = Engine::open(&model, &options).unwrap();
        let error = Session::load(&whole, &path).map(drop).unwrap_err().to_string();
        assert!(error.contains("layers 0..1"), "{error}");
    }
}

/// The last stage's file has its own states; the other stages compute theirs again from the tokens.
#[test]
fn a_conversation_over_stages_is_saved_and_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat");
    let tokens = random_tokens(40, 160, 40);
    for family in KEEPING {
        let [model, _] = containers(family);
        let options = options(Precision::Fast);
        let engine = staged(&model, &options, 3, false);
        let mut session = engine.session();
        session.extend(&tokens).unwrap();
        session.save(&path).unwrap();
        let mut loaded = Session::load(&engine, &path).unwrap();
        for session in [&mut session, &mut loaded] {
            session.push(TokenId(7)).unwrap();
        }
        assert_same_bits(loaded.logits(), session.logits(), family);
    }
}

/// Messages come from the network.
#[test]
fn a_damaged_message_is_answered_with_an_error() {
    let model = data("golden/qwen3moe.gguf");
    let stage = Stage::open(&model, &options(Precision::Fast).layers(0..2)).unwrap();
    let mut host = stage.host();
    let turn = |turn: &str, floats: usize| {
        let head = format!(r#"{{"Forward":{{"orders":[],"turns":[{turn}]}}}}"#);
        let mut message = (head.len() as u64).to_le_bytes().to_vec();
        message.extend(head.bytes());
        message.extend(vec![0; floats]);
        message
    };
    let good = r#"{"conversation":1,"start":0,"tokens":[1,2],"marks":[]}"#;
    let mut says = |message: &[u8]| String::from_utf8_lossy(&host.handle(message)).into_owned();
    assert!(says(&turn(good, 0)).contains("Through"));
    let failed = [
        turn(good, 4),
        turn(good, 3),
        turn(r#"{"conversation":1,"start":0,"tokens":[999999],"marks":[]}"#, 0),
        turn(r#"{"conversation":1,"start":0,"tokens":[],"marks":[]}"#, 0),
        turn(r#"{"conversation":1,"start":-1,"tokens":[1],"marks":[]}"#, 0),
        b"\xff\xff\xff\xff\xff\xff\xff\xff{}".to_vec(),
        b"short".to_vec(),
        Vec::new(),
    ];
    for message in failed {
        let reply = says(&message);
        assert!(reply.contains("Failed"), "{reply}");
    }
    let ahead = r#"{"conversation":1,"start":5,"tokens":[1],"marks":[9,3]}"#;
    assert!(says(&turn(ahead, 0)).contains("Missing"));
    let twice = format!("{good},{good}");
    assert!(says(&turn(&twice, 0)).contains("Through"));
    assert!(says(&turn(good, 0)).contains("Through"));
}
