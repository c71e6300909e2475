//! How fast a model runs and what limits its speed: measured during a run, predicted before one, simulated on recorded routing.

pub mod bound;
pub mod place;
pub mod predict;
pub(crate) mod preference;
pub(crate) mod probe;
pub(crate) mod rehearsal;
pub mod simulate;
pub mod trace;

pub use probe::DriveProbe;
pub use rehearsal::ComputeTime;
