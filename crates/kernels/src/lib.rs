//! CPU arithmetic on slices, for each instruction set. This crate knows nothing about models and files, and does not
//! decide how work is divided among threads.
//!
//! [`scalar`] defines what every kernel computes, to the bit. The other instruction sets compute the same faster.
//! [`Kernels`] is the table of the kernels for this CPU. [`quant`] defines what the bytes of each type mean.

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
pub use scalar::{
    Activation, AttentionStep, DeltaStep, Gate, KEY_BLOCK, KvRef, RopePairs, RunningSoftmax, STATE_COLUMNS,
    Tap,
};
pub use tensor::{MatRef, Planes, Q8Panel, Rows, TileMut};
