//! Models with limited memory for experts, on the device and in RAM.

use std::path::Path;

use forebay_engine::plan::ExpertMemory;
use forebay_engine::{Engine, Error, Options, Precision, Prospect};

use crate::device::{TestDevice, open, with};
use crate::models::random_tokens;
/// The chunk size of prompts, whatever the memory.
const CHUNK: usize = 24;

/// How much memory there is for experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Room {
    All,
    Percent(u64),
    Least,
}

fn with_memory<D: TestDevice>(vram: Option<u64>, precision: Precision) -> Options {
    with(open::<D>(vram), precision).chunk(CHUNK)
}

/// The memory that a refusal asks for.
pub(crate) fn need(model: &Path, options: &Options) -> u64 {
    match Prospect::new(model, options) {
        Err(Error::Budget { need, .. }) => need,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("a little is enough for everything"),
    }
}

/// Options with this much memory for experts, on the device and in RAM.
pub(crate) fn tiers<D: TestDevice>(model: &Path, precision: Precision, vram: Room, ram: Room) -> Options {
    let roomy = with_memory::<D>(None, precision);
    let whole = Prospect::new(model, &roomy).unwrap().plan().device.clone().unwrap();
    let least = need(model, &with_memory::<D>(Some(1), precision));
    let bytes = match vram {
        Room::All => whole.total(),
        Room::Percent(percent) => (whole.fixed() + whole.slot_bytes * percent / 100).max(least),
        Room::Least => least,
    };
    let options = with_memory::<D>(Some(bytes), precision);
    let expert_memory = match ram {
        Room::All => ExpertMemory::Percent(100.0),
        Room::Percent(percent) => ExpertMemory::Percent(percent as f64),
        Room::Least => {
            let little = options.clone().expert_memory(ExpertMemory::Bytes(1));
            ExpertMemory::Bytes(need(model, &little))
        }
    };
    options.expert_memory(expert_memory)
}

/// An answer of an engine whose computation may fail.
pub(crate) fn answer(engine: &Engine) -> Result<Vec<f32>, Error> {
    let tokens = random_tokens(40, 100, 22);
    let mut session = engine.session();
    session.extend(&tokens[..30])?;
    let mut all = session.logits().to_vec();
    for &token in &tokens[30..] {
        session.push(token)?;
        all.extend_from_slice(session.logits());
    }
    Ok(all)
}
