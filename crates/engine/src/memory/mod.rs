//! Memory: regions that hold weights, what the machine has, and the ledger of who has how much.

mod ledger;
mod machine;
mod region;

pub use ledger::{Hold, MemoryEntry, MemoryTier, Purpose};
pub(crate) use ledger::{Ledger, Lender, TierPlan};
pub use machine::{GroupLimit, Machine, Pressure, Relief, resident};
pub use region::*;
