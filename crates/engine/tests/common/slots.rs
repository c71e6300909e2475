//! Budgets that leave experts little room.

use forebay_engine::internals::memory::Machine;
use forebay_engine::{Engine, Error, Options, Prospect};

use super::models::demo_model;

/// How near the room for slots comes to what was asked for.
const NEAR: u64 = 128 << 10;

/// What a plan starts from. It is not this process, in which other tests run.
pub fn machine() -> Machine {
    Machine { total: None, available: None, resident: 64 << 20 }
}

/// The demo model in memory for its fixed part and about so many bytes of slots.
pub fn engine_with_slots(bytes: u64, options: Options) -> Engine {
    let model = demo_model();
    let plenty = options.memory(1 << 40).machine(machine());
    let plan = Prospect::new(&model, &plenty).unwrap().plan().clone();
    // The room to move is larger where the budget is.
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
