//! How many experts are on the device and in RAM changes time and never bits.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_engine::internals::backend::BufShape;
use forebay_engine::internals::experts::{Device, ExecutorBuilder, Meters, Picture, Residency};
use forebay_engine::internals::memory::SharedBytes;
use forebay_engine::{Cancel, Engine, Error, Grammar, Options, Precision, Prospect, Session, TokenId, Turn};
use forebay_kernels::Encoding;
use forebay_testing::{assert_same_bits, relative_error};

use crate::device::{CountingDevice, TestDevice, Use, open};
use crate::models::{MIXTURES, containers, data, demo_model, random_tokens};
use crate::rooms::{Room, answer, tiers};

/// The logits of a prompt, of single tokens, and of several conversations together.
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
    // As many conversations as one conversation's reserved memory has pages for.
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

fn compare<D: TestDevice>(model: &Path, precision: Precision, rooms: &[(Room, Room)]) {
    let (expected, meters) = run(model, &tiers::<D>(model, precision, Room::All, Room::Least));
    assert_eq!((meters.misses, meters.hits), (0, 0), "nothing is asked of the store");
    for &(vram, ram) in rooms {
        let what = format!("{}, {precision:?}, device {vram:?}, RAM {ram:?}", model.display());
        let (ours, meters) = run(model, &tiers::<D>(model, precision, vram, ram));
        assert_same_bits(&ours, &expected, &what);
        assert!(meters.device_hits > 0 || vram == Room::Least, "{what}");
        assert!(meters.bytes_lifted > 0, "{what}");
        assert_eq!(ram == Room::All, meters.misses == 0, "{what}");
    }
}

pub fn residency_changes_no_bit<D: TestDevice>() {
    let rooms = [Room::All, Room::Percent(30), Room::Least];
    let pairs: Vec<_> = rooms[1..].iter().flat_map(|&vram| rooms.map(|ram| (vram, ram))).collect();
    // With this much memory, some layers are completely on the device.
    let pairs = [&pairs[..], &[(Room::Percent(90), Room::Percent(50))]].concat();
    for precision in [Precision::Exact, Precision::Fast] {
        compare::<D>(&data("golden/qwen3moe.gguf"), precision, &pairs);
    }
}

pub fn residency_changes_no_bit_of_any_family<D: TestDevice>() {
    let families = MIXTURES.iter().copied().enumerate().map(|(i, family)| containers(family)[i % 2].clone());
    let others = ["gpt_oss", "gpt_oss-mxfp4", "glm4moe-mtp", "qwen3moe-mlx", "qwen3moe-fp8"];
    let others = others.map(|name| data(&format!("golden/{name}")));
    let models: Vec<PathBuf> = families.chain(others).collect();
    for model in models {
        compare::<D>(
            &model,
            Precision::Fast,
            &[(Room::Percent(30), Room::Percent(50)), (Room::Least, Room::Least)],
        );
    }
}

/// Experts that are uploaded early, for a prompt or by prediction, are used if they are needed and dropped otherwise.
pub fn what_is_sent_ahead_changes_no_bit<D: TestDevice>() {
    for model in [data("golden/qwen3moe.gguf"), data("golden/deepseek_v3.gguf"), demo_model()] {
        for ram in [Room::Percent(60), Room::All] {
            let options = tiers::<D>(&model, Precision::Fast, Room::Percent(30), ram);
            let (expected, without) = run(&model, &options.clone().prefetch(false));
            assert!(without.sent_ahead > 0 || ram != Room::All, "a prompt's experts are sent");
            let (ours, with) = run(&model, &options.prefetch(true));
            assert_same_bits(&ours, &expected, &format!("{}, sent ahead", model.display()));
            assert!(with.sent_ahead > without.sent_ahead && with.sent_used > 0, "{with:?}");
            assert!(with.sent_used <= with.sent_ahead, "{with:?}");
        }
    }
}

/// Experts that the CPU computes give the device's results up to rounding, and need not be uploaded.
pub fn the_processor_computes_experts_beside_the_device<D: TestDevice>() {
    for model in [data("golden/qwen3moe.gguf"), data("golden/gpt_oss.gguf")] {
        // Early uploads may not be needed, so they would disturb the count.
        let options = tiers::<D>(&model, Precision::Exact, Room::Percent(30), Room::All);
        let alone = options.prefetch(false);
        let (expected, without) = run(&model, &alone);
        let assisted = Altered::of(&alone, true, Some(1e7)).cpu_experts(true);
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

/// The next start loads the hottest experts into the device's slots, and the next ones into RAM.
pub fn a_warm_start_fills_both_tiers_with_different_experts<D: TestDevice>() {
    let heat = tempfile::tempdir().unwrap();
    let model = demo_model();
    let options = tiers::<D>(&model, Precision::Fast, Room::Percent(30), Room::Percent(40));
    let options = options.heat(Some(heat.path().to_owned()));
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

/// Conversations beyond the reserved memory borrow it from slots, and return it. There is a limit.
pub fn slots_are_lent_to_conversations<D: CountingDevice>() {
    let model = data("golden/qwen3moe.gguf");
    let options = tiers::<D>(&model, Precision::Fast, Room::Percent(80), Room::Percent(50));
    let device = open::<D>(Some(options.device.as_ref().unwrap().memory()));
    let experts = || -> u64 {
        D::used(&device).iter().filter(|(what, _)| *what == Use::Experts).map(|(_, bytes)| bytes).sum()
    };
    let engine = Engine::open(&model, &options.device(Some(device.clone()))).unwrap();
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
    // The same logits as the first conversation with the same token, with other experts on the device.
    for (i, (_, logits)) in many.iter().enumerate().skip(90) {
        assert_same_bits(logits, &many[i % 90].1, "another conversation");
    }
    drop(many);
    assert_same_bits(&answer(&engine).unwrap(), &truth, "after all have ended");
    assert_eq!(experts(), all, "slots are back");
}

/// What the caller does with logits does not affect experts: they stay where they are.
pub fn a_step_that_is_given_up_leaves_experts_on_the_device<D: TestDevice>() {
    let model = data("golden/qwen3moe.gguf");
    let engine =
        Engine::open(&model, &tiers::<D>(&model, Precision::Fast, Room::All, Room::Percent(50))).unwrap();
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

/// A thread that has never used the device may be the next to compute, or to drop the engine.
pub fn any_thread_may_compute<D: TestDevice>() {
    let model = data("golden/qwen3moe.gguf");
    for (vram, ram) in [(Room::All, Room::All), (Room::Percent(30), Room::Percent(50))] {
        let engine = Engine::open(&model, &tiers::<D>(&model, Precision::Fast, vram, ram)).unwrap();
        let there = |engine: Engine| std::thread::spawn(move || answer(&engine)).join().unwrap().unwrap();
        let truth = there(engine.clone());
        assert_same_bits(&there(engine), &truth, "another thread");
    }
}

/// Grammars are in RAM. They are limited by it, and the device's slots stay.
pub fn grammars_take_no_memory_of_the_device<D: CountingDevice>() {
    let options = tiers::<D>(&demo_model(), Precision::Fast, Room::Percent(30), Room::Percent(30));
    let memory = Some(Prospect::new(&demo_model(), &options).unwrap().plan().total());
    let device = open::<D>(Some(options.device.as_ref().unwrap().memory()));
    let options = options.device(Some(device.clone())).memory(memory);
    let engine = Engine::open(&demo_model(), &options).unwrap();
    let used = D::used(&device);
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
    assert_eq!(D::used(&device), used);
    // A conversation needs no RAM.
    engine.session().push(TokenId(1)).unwrap();
    drop(many);
    grammar().unwrap();
}

/// A device with altered properties: on a system that does not allow pinning, or on a slow link.
struct Altered {
    device: Arc<dyn Device>,
    pins: bool,
    link: Option<f64>,
}

impl Altered {
    fn of(options: &Options, pins: bool, link: Option<f64>) -> Options {
        let device = options.device.clone().unwrap();
        options.clone().device(Some(Arc::new(Altered { device, pins, link })))
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

    fn memory_speed(&self) -> Result<f64, Error> {
        self.device.memory_speed()
    }

    fn link_speed(&self) -> Result<f64, Error> {
        self.link.map_or_else(|| self.device.link_speed(), Ok)
    }

    fn pin(&self, memory: SharedBytes) -> Result<Box<dyn Send>, Error> {
        if self.pins { self.device.pin(memory) } else { Err(Error::Backend("not allowed".into())) }
    }
}

/// Then experts are uploaded through a small buffer.
pub fn slots_that_cannot_be_pinned_are_copied_from<D: TestDevice>() {
    let model = data("golden/qwen3moe.gguf");
    let options = tiers::<D>(&model, Precision::Fast, Room::Percent(30), Room::Percent(50));
    let truth = answer(&Engine::open(&model, &options).unwrap()).unwrap();
    let options = Altered::of(&options, false, None);
    let engine = Engine::open(&model, &options).unwrap();
    assert_same_bits(&answer(&engine).unwrap(), &truth, "not pinned");
    assert!(options.device.unwrap().link_speed().unwrap() > 0.0);
}
