//! How many experts are in the GPU's memory and how many in the computer's changes time and never bits.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_cuda::Cuda;
use forebay_engine::backend::BufShape;
use forebay_engine::experts::{Device, ExecutorBuilder, Meters, Picture, Residency};
use forebay_engine::memory::SharedBytes;
use forebay_engine::{Cancel, Engine, Error, Grammar, Options, Precision, Prospect, Session, TokenId, Turn};
use forebay_kernels::Encoding;
use forebay_testing::{assert_same_bits, relative_error};

use crate::common::gpu;
use crate::common::models::{MIXTURES, containers, data, demo_model, random_tokens};
use crate::common::tiers::{Room, answer, tiers};

/// The logits of a prompt, of tokens one by one, and of several conversations together.
fn run(model: &Path, options: &Options) -> (Vec<f32>, Meters) {
    let engine = Engine::open(model, options).unwrap();
    let tokens = random_tokens(40, 100, 21);
    let mut session = engine.session();
    session.extend(&tokens[..30]).unwrap();
    let mut all = session.logits().to_vec();
    for &token in &tokens[30..] {
        session.push(token).unwrap();
        all.extend_from_slice(session.logits());
    }
    drop(session);
    // As many as the memory that is set aside for one has pages for.
    for count in [2, engine.plan().reserved.min(384) / 64] {
        let mut together: Vec<Session> = (0..count).map(|_| engine.session()).collect();
        for step in 0..2 {
            let tokens: Vec<[TokenId; 1]> = (0..count).map(|i| [TokenId((11 * i + step) as u32)]).collect();
            let turn = |(session, tokens)| Turn { session, tokens, logits: true, marks: &[] };
            let mut turns: Vec<Turn<'_>> =
                together.iter_mut().zip(&tokens).map(|(s, t)| turn((s, &t[..]))).collect();
            let mut step = engine.step(&mut turns, &Cancel::default()).unwrap();
            while let Some((_, mut row)) = step.next_row().unwrap() {
                all.extend_from_slice(row.all().unwrap());
            }
            step.finish().unwrap();
        }
    }
    (all, engine.meters())
}

fn compare(model: &Path, precision: Precision, rooms: &[(Room, Room)]) {
    let (expected, meters) = run(model, &tiers(model, precision, Room::All, Room::Least));
    assert_eq!((meters.misses, meters.hits), (0, 0), "nothing is asked of the store");
    for &(vram, ram) in rooms {
        let what = format!("{}, {precision:?}, GPU {vram:?}, RAM {ram:?}", model.display());
        let (ours, meters) = run(model, &tiers(model, precision, vram, ram));
        assert_same_bits(&ours, &expected, &what);
        assert!(meters.device_hits > 0 || vram == Room::Least, "{what}");
        assert!(meters.bytes_lifted > 0, "{what}");
        assert_eq!(ram == Room::All, meters.misses == 0, "{what}");
    }
}

#[test]
fn residency_changes_no_bit() {
    if gpu().is_none() {
        return;
    }
    let rooms = [Room::All, Room::Percent(30), Room::Least];
    let pairs: Vec<_> = rooms[1..].iter().flat_map(|&vram| rooms.map(|ram| (vram, ram))).collect();
    // Where there is this much room, some layers are on the GPU as a whole.
    let pairs = [&pairs[..], &[(Room::Percent(90), Room::Percent(50))]].concat();
    for precision in [Precision::Exact, Precision::Fast] {
        compare(&data("golden/qwen3moe.gguf"), precision, &pairs);
    }
}

#[test]
fn residency_changes_no_bit_of_any_family() {
    if gpu().is_none() {
        return;
    }
    let families = MIXTURES.into_iter().enumerate().map(|(i, family)| containers(family)[i % 2].clone());
    let others = ["gpt_oss", "gpt_oss-mxfp4", "glm4moe-mtp", "qwen3moe-mlx", "qwen3moe-fp8"];
    let others = others.map(|name| data(&format!("golden/{name}")));
    let models: Vec<PathBuf> = families.chain(others).collect();
    for model in models {
        compare(
            &model,
            Precision::Fast,
            &[(Room::Percent(30), Room::Percent(50)), (Room::Least, Room::Least)],
        );
    }
}

/// What is sent ahead, for a prompt or because it is foreseen, is computed with if it is asked for, and forgotten if it is not.
#[test]
fn what_is_sent_ahead_changes_no_bit() {
    if gpu().is_none() {
        return;
    }
    for model in [data("golden/qwen3moe.gguf"), data("golden/deepseek_v3.gguf"), demo_model()] {
        for ram in [Room::Percent(60), Room::All] {
            let options = tiers(&model, Precision::Fast, Room::Percent(30), ram);
            let (expected, without) = run(&model, &Options { no_prefetch: true, ..options.clone() });
            assert!(without.sent_ahead > 0 || ram != Room::All, "a prompt's experts are sent");
            let (ours, with) = run(&model, &Options { no_prefetch: false, ..options });
            assert_same_bits(&ours, &expected, &format!("{}, sent ahead", model.display()));
            assert!(with.sent_ahead > without.sent_ahead && with.sent_used > 0, "{with:?}");
            assert!(with.sent_used <= with.sent_ahead, "{with:?}");
        }
    }
}

/// Experts that the processor computes give what the GPU's would, but for rounding, and are fewer to bring.
#[test]
fn the_processor_computes_experts_beside_the_gpu() {
    if gpu().is_none() {
        return;
    }
    for model in [data("golden/qwen3moe.gguf"), data("golden/gpt_oss.gguf")] {
        // What is sent ahead is brought, and may not be asked for.
        let options = tiers(&model, Precision::Exact, Room::Percent(30), Room::All);
        let alone = Options { no_prefetch: true, ..options };
        let (expected, without) = run(&model, &alone);
        let assisted = Options { cpu_experts: true, ..Altered::of(&alone, true, Some(1e7)) };
        let engine = Engine::open(&model, &assisted).unwrap();
        assert!(engine.backend_name().contains("--cpu-experts"), "{}", engine.backend_name());
        drop(engine);
        let (ours, with) = run(&model, &assisted);
        assert!(with.computed_in_memory > 0 && without.computed_in_memory == 0, "{with:?}");
        assert!(with.bytes_lifted < without.bytes_lifted, "{with:?}, {without:?}");
        let error = relative_error(&ours, &expected);
        assert!(error < 1e-3, "{}: relative error {error}", model.display());
    }
}

/// What was hot is read at the next start: into the GPU's slots, and what they have no room for into the computer's.
#[test]
fn a_warm_start_fills_both_tiers_with_different_experts() {
    if gpu().is_none() {
        return;
    }
    let heat = tempfile::tempdir().unwrap();
    let model = demo_model();
    let options = tiers(&model, Precision::Fast, Room::Percent(30), Room::Percent(40));
    let options = Options { heat: Some(heat.path().to_owned()), ..options };
    let (expected, _) = run(&model, &options);
    let engine = Engine::open(&model, &options).unwrap();
    let mut picture = Picture::default();
    engine.look(&mut picture);
    let count = |place| picture.experts().iter().filter(|sight| sight.place == place).count();
    let plan = engine.plan();
    assert_eq!(count(Residency::Device), plan.device.as_ref().unwrap().slot_count());
    assert_eq!(count(Residency::Resident), plan.slots.iter().sum::<usize>());
    drop(engine);
    assert_same_bits(&run(&model, &options).0, &expected, "after a warm start");
}

/// More conversations than memory was set aside for take it from slots, and give it back; there is an end to it.
#[test]
fn slots_are_lent_to_conversations() {
    if gpu().is_none() {
        return;
    }
    let model = data("golden/qwen3moe.gguf");
    let options = tiers(&model, Precision::Fast, Room::Percent(80), Room::Percent(50));
    let device = Arc::new(Cuda::open(0, Some(options.device.as_ref().unwrap().memory())).unwrap());
    let experts = || device.used().iter().find(|(what, _)| *what == "experts").map_or(0, |(_, bytes)| *bytes);
    let engine = Engine::open(&model, &Options { device: Some(device.clone()), ..options }).unwrap();
    let truth = answer(&engine).unwrap();
    let all = experts();
    assert!(all > 0);
    let mut many: Vec<(Session, Vec<f32>)> = Vec::new();
    let refused = loop {
        let mut session = engine.session();
        match session.push(TokenId(many.len() as u32 % 90)) {
            Ok(()) => {
                let logits = session.logits().to_vec();
                many.push((session, logits));
            }
            Err(error) => break error,
        }
        assert!(many.len() < 10_000, "memory ends some time");
    };
    assert!(matches!(refused, Error::Budget { .. }), "{refused}");
    assert!(many.len() > engine.plan().reserved / 64 && experts() < all, "{} of {all}", experts());
    // What the first one of the same token gave, with other experts on the GPU.
    for (i, (_, logits)) in many.iter().enumerate().skip(90) {
        assert_same_bits(logits, &many[i % 90].1, "another conversation");
    }
    drop(many);
    assert_same_bits(&answer(&engine).unwrap(), &truth, "after all have ended");
    assert_eq!(experts(), all, "slots are back");
}

/// What becomes of the logits has nothing to do with experts: they stay where they are.
#[test]
fn a_step_that_is_given_up_leaves_experts_on_the_gpu() {
    if gpu().is_none() {
        return;
    }
    let model = data("golden/qwen3moe.gguf");
    let engine = Engine::open(&model, &tiers(&model, Precision::Fast, Room::All, Room::Percent(50))).unwrap();
    let truth = answer(&engine).unwrap();
    let lifted = engine.meters().bytes_lifted;
    let mut session = engine.session();
    let mut turns = [Turn { session: &mut session, tokens: &[TokenId(1)], logits: true, marks: &[] }];
    let mut step = engine.step(&mut turns, &Cancel::default()).unwrap();
    assert_eq!(step.next_row().unwrap().unwrap().0, 0);
    drop(step);
    assert!(session.tokens().is_empty());
    drop(session);
    assert_same_bits(&answer(&engine).unwrap(), &truth, "after the step");
    assert_eq!(engine.meters().bytes_lifted, lifted, "nothing had to be brought again");
}

/// A thread that has never used the GPU may be the next to compute, and to drop what it has there.
#[test]
fn any_thread_may_compute() {
    if gpu().is_none() {
        return;
    }
    let model = data("golden/qwen3moe.gguf");
    for (vram, ram) in [(Room::All, Room::All), (Room::Percent(30), Room::Percent(50))] {
        let engine = Engine::open(&model, &tiers(&model, Precision::Fast, vram, ram)).unwrap();
        let there = |engine: Engine| std::thread::spawn(move || answer(&engine)).join().unwrap().unwrap();
        let truth = there(engine.clone());
        assert_same_bits(&there(engine), &truth, "another thread");
    }
}

/// More than is free is not there, whatever is asked for.
#[test]
fn a_budget_is_no_more_than_is_free() {
    if gpu().is_none() {
        return;
    }
    let all = Cuda::open(0, None).unwrap().memory();
    assert_eq!(Cuda::open(0, Some(1 << 20)).unwrap().memory(), 1 << 20);
    let asked = Cuda::open(0, Some(1 << 50)).unwrap().memory();
    // Other tests use some meanwhile.
    assert!(asked < 1 << 50 && asked > all / 2, "{asked} of {all}");
}

/// Grammars are in the computer's memory: they end with that, and the GPU's slots stay as they are.
#[test]
fn grammars_take_no_memory_of_the_gpu() {
    if gpu().is_none() {
        return;
    }
    let options = tiers(&demo_model(), Precision::Fast, Room::Percent(30), Room::Percent(30));
    let memory = Some(Prospect::new(&demo_model(), &options).unwrap().plan().total());
    let device = Arc::new(Cuda::open(0, Some(options.device.as_ref().unwrap().memory())).unwrap());
    let options = Options { device: Some(device.clone()), memory, ..options };
    let engine = Engine::open(&demo_model(), &options).unwrap();
    let used = device.used();
    let grammar = || Grammar::lark(&engine, "start: /[a-z]+/");
    let mut many = vec![grammar().unwrap()];
    let refused = loop {
        match grammar() {
            Ok(another) => many.push(another),
            Err(error) => break error,
        }
        assert!(many.len() < 10_000, "memory ends some time");
    };
    assert!(
        matches!(refused, Error::Budget { .. }) && refused.to_string().contains("Options::memory"),
        "{refused}"
    );
    assert_eq!(device.used(), used);
    // A conversation needs none of it.
    engine.session().push(TokenId(1)).unwrap();
    drop(many);
    grammar().unwrap();
}

/// A GPU that is said to be otherwise: on a system that does not let it copy from the memory of others, or on a slow link.
struct Altered {
    device: Arc<dyn Device>,
    pins: bool,
    link: Option<f64>,
}

impl Altered {
    fn of(options: &Options, pins: bool, link: Option<f64>) -> Options {
        let device = options.device.clone().unwrap();
        Options { device: Some(Arc::new(Altered { device, pins, link })), ..options.clone() }
    }
}

impl Device for Altered {
    fn executor(
        &self,
        precision: Precision,
        buffers: &[BufShape],
    ) -> Result<Box<dyn ExecutorBuilder>, Error> {
        self.device.executor(precision, buffers)
    }

    fn computes(&self, encoding: Encoding) -> bool {
        self.device.computes(encoding)
    }

    fn memory(&self) -> u64 {
        self.device.memory()
    }

    fn chunk(&self) -> usize {
        self.device.chunk()
    }

    fn link_speed(&self) -> Result<f64, Error> {
        self.link.map_or_else(|| self.device.link_speed(), Ok)
    }

    fn pin(&self, memory: SharedBytes) -> Result<Box<dyn Send>, Error> {
        if self.pins { self.device.pin(memory) } else { Err(Error::Backend("not allowed".into())) }
    }
}

/// There experts come by way of a small buffer.
#[test]
fn slots_that_cannot_be_pinned_are_copied_from() {
    if gpu().is_none() {
        return;
    }
    let model = data("golden/qwen3moe.gguf");
    let options = tiers(&model, Precision::Fast, Room::Percent(30), Room::Percent(50));
    let truth = answer(&Engine::open(&model, &options).unwrap()).unwrap();
    let options = Altered::of(&options, false, None);
    let engine = Engine::open(&model, &options).unwrap();
    assert_same_bits(&answer(&engine).unwrap(), &truth, "not pinned");
    assert!(options.device.unwrap().link_speed().unwrap() > 0.0);
}
