//! Memory: regions that hold weights, what the machine has, and the ledger of who has how much.

mod ledger;
mod machine;
mod region;

pub(crate) use ledger::Ledger;
pub use ledger::{Hold, MemoryEntry, MemoryTier, Purpose};
pub use machine::{GroupLimit, Machine, Pressure, Relief, resident};
pub use region::*;
