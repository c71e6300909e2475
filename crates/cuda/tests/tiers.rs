//! How many experts are in the GPU's memory and how many in the computer's changes time and never bits.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::gpu;
use common::models::{MIXTURES, assert_same_bits, containers, data, options, random_tokens};
use forebay_cuda::Cuda;
use forebay_engine::plan::ExpertMemory;
use forebay_engine::store::Meters;
use forebay_engine::{Cancel, Engine, Error, Options, Precision, Prospect, Session, TokenId, Turn};

/// Prompts in chunks of so many tokens, whatever the memory.
const CHUNK: usize = 24;

/// How much there is for experts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Room {
    All,
    Percent(u64),
    Least,
}

fn with_memory(vram: Option<u64>, precision: Precision) -> Options {
    let device = Arc::new(Cuda::open(0, vram).unwrap());
    Options { device: Some(device), chunk: Some(CHUNK), ..options(precision) }
}

/// What a refusal says is needed.
fn need(model: &Path, options: &Options) -> u64 {
    match Prospect::new(model, options) {
        Err(Error::Budget { need, .. }) => need,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("a little is enough for everything"),
    }
}

/// Options with so much room for experts in the GPU's memory and in the computer's.
fn tiers(model: &Path, precision: Precision, vram: Room, ram: Room) -> Options {
    let roomy = with_memory(None, precision);
    let whole = Prospect::new(model, &roomy).unwrap().plan().device.clone().unwrap();
    let least = need(model, &with_memory(Some(1), precision));
    let bytes = match vram {
        Room::All => whole.total(),
        Room::Percent(percent) => (whole.fixed() + whole.slot_bytes * percent / 100).max(least),
        Room::Least => least,
    };
    let options = with_memory(Some(bytes), precision);
    let expert_memory = match ram {
        Room::All => ExpertMemory::Percent(100.0),
        Room::Percent(percent) => ExpertMemory::Percent(percent as f64),
        Room::Least => {
            let little = Options { expert_memory: Some(ExpertMemory::Bytes(1)), ..options.clone() };
            ExpertMemory::Bytes(need(model, &little))
        }
    };
    Options { expert_memory: Some(expert_memory), ..options }
}

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
            engine.step(&mut turns, &Cancel::default(), |_, row| all.extend_from_slice(row)).unwrap();
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
    let others = ["gpt_oss", "gpt_oss-mxfp4", "glm4moe-mtp"].map(|name| data(&format!("golden/{name}")));
    let models: Vec<PathBuf> = families.chain(others).collect();
    for model in models {
        compare(
            &model,
            Precision::Fast,
            &[(Room::Percent(30), Room::Percent(50)), (Room::Least, Room::Least)],
        );
    }
}
