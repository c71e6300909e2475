//! What Forebay's own crates use in addition to the library's interface. Devices implement parts of it, and the program
//! displays parts of it.
//!
//! It mirrors the engine's modules and may change in any version. Semantic versioning does not cover it.

/// The operations of a forward pass, and the state of layers.
pub mod backend {
    pub use crate::backend::*;
}

/// The blocks of models.
pub mod blocks {
    pub use crate::blocks::*;
}

/// The expert store and its executors.
pub mod experts {
    pub use crate::experts::*;
}

/// Files that only their owner may read.
pub mod files {
    pub use crate::files::*;
}

/// Bounds, predictions, routing traces and simulation.
pub mod forecast {
    pub use crate::forecast::*;
}

/// Model files.
pub mod format {
    pub use crate::format::*;
}

/// Sampling.
pub mod generate {
    pub use crate::generate::*;
}

/// Hashes.
pub mod hash {
    pub use crate::hash::*;
}

/// The ledger, the machine, and regions for weights.
pub mod memory {
    pub use crate::memory::*;
}

/// The families of models.
pub mod models {
    pub use crate::models::*;
}

/// Events of a session for observers.
pub mod session {
    pub use crate::session::*;
}

/// Models with random weights.
pub mod synth {
    pub use crate::synth::*;
}
