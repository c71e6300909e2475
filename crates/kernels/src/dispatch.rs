//! The table of kernels for the detected instruction set.

use std::sync::OnceLock;

#[cfg(target_arch = "aarch64")]
use crate::neon;
use crate::scalar::{
    self, Activation, AttentionStep, DeltaStep, Gate, RopePairs, RunningSoftmax, STATE_COLUMNS, Tap,
};
use crate::tensor::{MatRef, Q8Panel, Rows, TileMut};
#[cfg(target_arch = "x86_64")]
use crate::{avx2, avx512};

/// An instruction set that the kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// x86-64 with AVX-512 F, BW, VL and VNNI.
    Avx512,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// 64-bit ARM with dot products of bytes (`dotprod`).
    Neon,
    /// Plain Rust, on every processor.
    Scalar,
}

impl Isa {
    /// The name in `FOREBAY_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Neon => "neon",
            Isa::Scalar => "scalar",
        }
    }

    /// The instruction sets that this CPU has, best first.
    pub fn available() -> Vec<Isa> {
        #[cfg(target_arch = "x86_64")]
        let native = [(Isa::Avx512, avx512::available()), (Isa::Avx2, avx2::available())];
        #[cfg(target_arch = "aarch64")]
        let native = [(Isa::Neon, neon::available())];
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let native: [(Isa, bool); 0] = [];
        let native = native.into_iter().filter_map(|(isa, available)| available.then_some(isa));
        native.chain([Isa::Scalar]).collect()
    }

    /// The instruction set that `FOREBAY_ISA` names, or else the best one.
    ///
    /// # Errors
    /// A message if the variable names an instruction set that this CPU or this program lacks.
    pub fn choose() -> Result<Isa, String> {
        let available = Isa::available();
        match std::env::var("FOREBAY_ISA") {
            Err(_) => Ok(available[0]),
            Ok(name) => available.iter().copied().find(|isa| isa.name() == name).ok_or_else(|| {
                let names: Vec<_> = available.iter().map(|isa| isa.name()).collect();
                format!("FOREBAY_ISA={name} is not supported here; this machine has {}", names.join(", "))
            }),
        }
    }
}

/// Every kernel for one instruction set. [`crate::scalar`] defines what each kernel does.
#[derive(Debug)]
#[allow(missing_docs, clippy::type_complexity)]
pub struct Kernels {
    pub isa: Isa,
    pub matmul_f32: fn(MatRef<'_>, Rows<'_, f32>, &mut TileMut<'_, f32>),
    pub matmul_q8: fn(MatRef<'_>, Rows<'_, Q8Panel>, &mut TileMut<'_, f32>),
    pub matmul_transposed: fn(MatRef<'_>, Rows<'_, f32>, &mut TileMut<'_, f32>),
    pub quantise: fn(&[f32], usize, &mut [Q8Panel]),
    pub rms_norm: fn(&mut [f32], &[f32], f32),
    pub layer_norm: fn(&mut [f32], &[f32], f32),
    pub rope: fn(&mut [f32], usize, RopePairs, &[f32], &[f32]),
    pub softmax: fn(&mut [f32]),
    pub attend: fn(&AttentionStep<'_>, &mut [RunningSoftmax], &mut [f32]),
    pub attend_finish: fn(&[RunningSoftmax], &mut [f32]),
    pub activate: fn(&mut [f32], &[f32], Activation),
    pub gate: fn(&mut [f32], &[f32], Gate),
    pub softcap: fn(&mut [f32], f32),
    pub convolve: fn(&[Tap<'_>], &mut [f32]),
    pub activate_silu: fn(&mut [f32]),
    pub l2_norm: fn(&mut [f32], f32, f32),
    pub delta_gates: fn(&mut [f32], &mut [f32], &[f32], &[f32]),
    pub delta_step: fn(&DeltaStep<'_>, Option<&[f32]>, &mut [f32], &mut [f32; STATE_COLUMNS]),
    pub add: fn(&mut [f32], &[f32]),
    pub add_scaled: fn(&mut [f32], f32, &[f32]),
    pub top_k: fn(&[f32], &mut [u32]),
}

impl Kernels {
    /// The kernels of the instruction set that [`Isa::choose`] names.
    ///
    /// # Errors
    /// As [`Isa::choose`].
    pub fn detect() -> Result<&'static Kernels, String> {
        static CHOSEN: OnceLock<Result<&'static Kernels, String>> = OnceLock::new();
        CHOSEN.get_or_init(|| Isa::choose().map(Kernels::for_isa)).clone()
    }

    /// The kernels of one instruction set.
    ///
    /// # Panics
    /// If it is not [available](Isa::available).
    pub fn for_isa(isa: Isa) -> &'static Kernels {
        assert!(Isa::available().contains(&isa), "this processor lacks {}", isa.name());
        match isa {
            Isa::Scalar => &SCALAR,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &AVX512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &AVX2,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &NEON,
            foreign => unreachable!("{} is for other processors", foreign.name()),
        }
    }
}

/// The table of a module whose functions need instructions that not every CPU has.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! table {
    ($isa:expr, $module:ident) => {
        Kernels {
            isa: $isa,
            matmul_f32: entry!($module::matmul_f32, w, x, out),
            matmul_q8: entry!($module::matmul_q8, w, x, out),
            matmul_transposed: entry!($module::matmul_transposed, w, x, out),
            quantise: entry!($module::quantise, x, block, out),
            rms_norm: entry!($module::rms_norm, x, w, eps),
            layer_norm: entry!($module::layer_norm, x, w, eps),
            rope: entry!($module::rope, x, head_dim, pairs, cos, sin),
            softmax: entry!($module::softmax, x),
            attend: entry!($module::attend, step, running, out),
            attend_finish: entry!($module::attend_finish, running, out),
            activate: entry!($module::activate, x, up, activation),
            gate: entry!($module::gate, x, logits, gate),
            softcap: entry!($module::softcap, x, cap),
            convolve: entry!($module::convolve, taps, out),
            activate_silu: entry!($module::activate_silu, x),
            l2_norm: entry!($module::l2_norm, x, eps, scale),
            delta_gates: entry!($module::delta_gates, a, b, rates, biases),
            delta_step: entry!($module::delta_step, step, before, state, out),
            add: entry!($module::add, x, y),
            add_scaled: entry!($module::add_scaled, out, weight, y),
            top_k: scalar::top_k,
        }
    };
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! entry {
    ($module:ident::$name:ident, $($arg:ident),*) => {
        // SAFETY: `for_isa` hands out a table only where its instructions are available.
        |$($arg),*| unsafe { $module::$name($($arg),*) }
    };
}

#[cfg(target_arch = "x86_64")]
static AVX512: Kernels = table!(Isa::Avx512, avx512);

#[cfg(target_arch = "x86_64")]
static AVX2: Kernels = table!(Isa::Avx2, avx2);

#[cfg(target_arch = "aarch64")]
static NEON: Kernels = table!(Isa::Neon, neon);

static SCALAR: Kernels = Kernels {
    isa: Isa::Scalar,
    matmul_f32: scalar::matmul_f32,
    matmul_q8: scalar::matmul_q8,
    matmul_transposed: scalar::matmul_transposed,
    quantise: scalar::quantise,
    rms_norm: scalar::rms_norm,
    layer_norm: scalar::layer_norm,
    rope: scalar::rope,
    softmax: scalar::softmax,
    attend: scalar::attend,
    attend_finish: scalar::attend_finish,
    activate: scalar::activate,
    gate: scalar::gate,
    softcap: scalar::softcap,
    convolve: scalar::convolve,
    activate_silu: scalar::activate_silu,
    l2_norm: scalar::l2_norm,
    delta_gates: scalar::delta_gates,
    delta_step: scalar::delta_step,
    add: scalar::add,
    add_scaled: scalar::add_scaled,
    top_k: scalar::top_k,
};
