//! What the tests of all crates share: how numbers are compared, and what a test does that cannot run here.

mod compare;
mod skip;

pub use compare::{assert_same_bits, relative_error, worst};
pub use skip::{Need, shared, skipped, vectors};
