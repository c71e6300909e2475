//! What Forebay's own crates use in addition to the library's interface. Devices implement parts of it, and the program
//! displays parts of it.
//!
//! It mirrors the engine's modules and may change in any version. Semantic versioning does not cover it.

/// The operations of a forward pass, and what layers keep of a sequence.
pub mod backend {
    pub use crate::backend::*;
}

/// What models are made of.
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

/// Files of models.
pub mod format {
    pub use crate::format::*;
}

/// Choosing tokens.
pub mod generate {
    pub use crate::generate::*;
}

/// Numbers that stand for bytes.
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

/// What a session tells those who look on.
pub mod session {
    pub use crate::session::*;
}

/// Models with random weights.
pub mod synth {
    pub use crate::synth::*;
}
