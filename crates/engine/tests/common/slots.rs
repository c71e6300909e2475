//! Budgets that leave experts little room.

use forebay_engine::{Engine, Options, Prospect};

/// The demo model in memory for its fixed part and about so many bytes of slots.
pub fn engine_with_slots(bytes: u64, options: Options) -> Engine {
    let model = super::common::demo_model();
    let plenty = Options { memory: Some(1 << 40), ..options };
    let plan = || Prospect::new(&model, &plenty).unwrap().plan().clone();
    // The first brings in pages of the program, which the process then has resident.
    plan();
    let plan = plan();
    // The room to move is larger where the budget is.
    let memory = plan.total() - plan.slot_bytes - (256 << 20) + (16 << 20) + bytes;
    Engine::open(&model, &Options { memory: Some(memory), chunk: Some(plan.chunk), ..plenty }).unwrap()
}
