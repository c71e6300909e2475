//! Memory: regions that hold weights, measurements of the machine, and the ledger of who uses how much.

mod ledger;
#[cfg(target_os = "macos")]
mod mac;
mod machine;
mod region;

pub use ledger::{Hold, MemoryEntry, MemoryTier, Purpose};
pub(crate) use ledger::{Ledger, Lender, TierPlan};
pub use machine::{GroupLimit, Machine, Pressure, Relief, of_process, resident};
pub use region::*;
