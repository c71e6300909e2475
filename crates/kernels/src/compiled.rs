//! Scalar kernels that are compiled for an instruction set.
//!
//! The operations of these kernels and their order are fixed, so the compiler can only make them faster. A kernel that
//! is not worth writing by hand comes from this macro, in the module of each instruction set.

/// Defines kernels as the scalar ones, compiled with these target features.
macro_rules! compiled_scalar_kernels {
    ($features:literal) => {
        /// As [`scalar::quantise`](crate::scalar::quantise).
        #[target_feature(enable = $features)]
        pub fn quantise(x: &[f32], block: usize, out: &mut [$crate::Q8Panel]) {
            $crate::scalar::quantise(x, block, out);
        }

        /// As [`scalar::rms_norm`](crate::scalar::rms_norm).
        #[target_feature(enable = $features)]
        pub fn rms_norm(x: &mut [f32], w: &[f32], eps: f32) {
            $crate::scalar::rms_norm(x, w, eps);
        }

        /// As [`scalar::layer_norm`](crate::scalar::layer_norm).
        #[target_feature(enable = $features)]
        pub fn layer_norm(x: &mut [f32], w: &[f32], eps: f32) {
            $crate::scalar::layer_norm(x, w, eps);
        }

        /// As [`scalar::rope`](crate::scalar::rope).
        #[target_feature(enable = $features)]
        pub fn rope(x: &mut [f32], head_dim: usize, pairs: $crate::RopePairs, cos: &[f32], sin: &[f32]) {
            $crate::scalar::rope(x, head_dim, pairs, cos, sin);
        }

        /// As [`scalar::softmax`](crate::scalar::softmax).
        #[target_feature(enable = $features)]
        pub fn softmax(x: &mut [f32]) {
            $crate::scalar::softmax(x);
        }

        /// As [`scalar::attend_finish`](crate::scalar::attend_finish).
        #[target_feature(enable = $features)]
        pub fn attend_finish(running: &[$crate::RunningSoftmax], out: &mut [f32]) {
            $crate::scalar::attend_finish(running, out);
        }

        /// As [`scalar::activate`](crate::scalar::activate).
        #[target_feature(enable = $features)]
        pub fn activate(x: &mut [f32], up: &[f32], activation: $crate::Activation) {
            $crate::scalar::activate(x, up, activation);
        }

        /// As [`scalar::gate`](crate::scalar::gate).
        #[target_feature(enable = $features)]
        pub fn gate(x: &mut [f32], logits: &[f32], gate: $crate::Gate) {
            $crate::scalar::gate(x, logits, gate);
        }

        /// As [`scalar::softcap`](crate::scalar::softcap).
        #[target_feature(enable = $features)]
        pub fn softcap(x: &mut [f32], cap: f32) {
            $crate::scalar::softcap(x, cap);
        }

        /// As [`scalar::convolve`](crate::scalar::convolve).
        #[target_feature(enable = $features)]
        pub fn convolve(taps: &[$crate::Tap<'_>], out: &mut [f32]) {
            $crate::scalar::convolve(taps, out);
        }

        /// As [`scalar::activate_silu`](crate::scalar::activate_silu).
        #[target_feature(enable = $features)]
        pub fn activate_silu(x: &mut [f32]) {
            $crate::scalar::activate_silu(x);
        }

        /// As [`scalar::l2_norm`](crate::scalar::l2_norm).
        #[target_feature(enable = $features)]
        pub fn l2_norm(x: &mut [f32], eps: f32, scale: f32) {
            $crate::scalar::l2_norm(x, eps, scale);
        }

        /// As [`scalar::delta_gates`](crate::scalar::delta_gates).
        #[target_feature(enable = $features)]
        pub fn delta_gates(a: &mut [f32], b: &mut [f32], rates: &[f32], biases: &[f32]) {
            $crate::scalar::delta_gates(a, b, rates, biases);
        }

        /// As [`scalar::delta_step`](crate::scalar::delta_step).
        #[target_feature(enable = $features)]
        pub fn delta_step(
            step: &$crate::DeltaStep<'_>,
            before: Option<&[f32]>,
            state: &mut [f32],
            out: &mut [f32; $crate::STATE_COLUMNS],
        ) {
            $crate::scalar::delta_step(step, before, state, out);
        }

        /// As [`scalar::add`](crate::scalar::add).
        #[target_feature(enable = $features)]
        pub fn add(x: &mut [f32], y: &[f32]) {
            $crate::scalar::add(x, y);
        }

        /// As [`scalar::add_scaled`](crate::scalar::add_scaled).
        #[target_feature(enable = $features)]
        pub fn add_scaled(out: &mut [f32], weight: f32, y: &[f32]) {
            $crate::scalar::add_scaled(out, weight, y);
        }
    };
}
pub(crate) use compiled_scalar_kernels;
