//! CPU arithmetic on slices. This crate knows no model, no file and no thread pool policy.
//!
//! [`scalar`] says what every kernel computes, to the bit; the other instruction sets repeat it faster, and
//! [`Kernels`] is the table of the ones this processor runs. [`quant`] says what the bytes of each type mean.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod compiled;
mod dispatch;
mod dtype;
mod encoding;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod generic;
pub mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pool;
pub mod quant;
pub mod scalar;
mod tensor;

pub use dispatch::{Isa, Kernels};
pub use dtype::DType;
pub use encoding::{Affine, Encoding, Tiles};
pub use pool::{Grain, Piece, Pool};
pub use scalar::{AttentionStep, DeltaStep, KEY_BLOCK, KvRef, RopePairs, RunningSoftmax, STATE_COLUMNS, Tap};
pub use tensor::{MatRef, Planes, Q8Panel, Rows, TileMut};
