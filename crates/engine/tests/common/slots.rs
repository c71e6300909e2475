//! Budgets with few expert slots.

use forebay_engine::internals::memory::Machine;
use forebay_engine::{Engine, Error, Options, Prospect};

use super::models::demo_model;

/// How close the bytes of slots come to the requested number.
const NEAR: u64 = 128 << 10;

/// The machine that plans start from. It is not this process, in which other tests run as well.
pub fn machine() -> Machine {
    Machine { total: None, available: None, resident: 64 << 20 }
}

/// The demo model with memory for its fixed part and about this many bytes of slots.
pub fn engine_with_slots(bytes: u64, options: Options) -> Engine {
    let model = demo_model();
    let plenty = options.memory(1 << 40).machine(machine());
    let plan = Prospect::new(&model, &plenty).unwrap().plan().clone();
    // A larger budget has a larger reserve, so the right budget is found by trying.
    let mut memory = plan.total() - plan.slot_bytes - (256 << 20) + (16 << 20) + bytes;
    for _ in 0..16 {
        let options = plenty.clone().memory(memory).chunk(plan.chunk);
        match Engine::open(&model, &options) {
            Ok(engine) => {
                let room = engine.plan().budget - engine.plan().fixed();
                if room.abs_diff(bytes) < NEAR {
                    return engine;
                }
                memory = memory + bytes - room;
            }
            Err(Error::Budget { need, have, .. }) => memory += need - have,
            Err(error) => panic!("{error}"),
        }
    }
    panic!("no budget leaves {bytes} bytes for slots");
}
