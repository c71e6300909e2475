//! The frequencies of rotary position embeddings: plain, or scaled for contexts longer than the model was first
//! trained on.
//!
//! They are computed in f64 and rounded to f32 once, which agrees with the f32 references to within a rounding.

use std::f64::consts::TAU;

/// How the rotation is scaled for longer contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Plain,
    /// All frequencies are divided by a factor.
    Linear(f64),
    /// Slow frequencies are divided by a factor, fast ones are not.
    Llama3(Llama3),
    /// The base of the frequencies is raised, so that the slowest is divided by this.
    RaisedBase(f64),
    /// Like Llama 3, with other boundaries; cosine and sine are scaled too.
    Yarn(Yarn),
    /// By divisors that the file lists. They are those for contexts up to the original one.
    Listed {
        /// The factor of cosine and sine.
        scale: f64,
        /// The length of the original context.
        original: usize,
    },
    /// Only the fastest frequencies rotate; the channels of the others stay as they are.
    Proportional {
        /// The share of the channels that rotate.
        share: f64,
        /// Divisor of their frequencies.
        factor: f64,
    },
}

/// Llama 3.1's scaling. The number of rotations in the original context decides whether a frequency is slow or fast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3 {
    /// Divisor of the slow frequencies.
    pub factor: f64,
    /// Length of the original context.
    pub original: f64,
    /// Frequencies with fewer rotations are slow.
    pub low: f64,
    /// Frequencies with more rotations are fast.
    pub high: f64,
}

/// YaRN scaling. The index of a frequency decides whether it is slow or fast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Divisor of the slow frequencies.
    pub factor: f64,
    /// Length of the original context.
    pub original: f64,
    /// Rotations in the original context of the last fast frequency.
    pub beta_fast: f64,
    /// Rotations in the original context of the first slow frequency.
    pub beta_slow: f64,
    /// Whether the boundaries are rounded outwards to whole indices.
    pub round: bool,
    /// The factor of cosine and sine.
    pub scale: f64,
    /// For attention that multiplies its scores by [`magnitude`](Self::magnitude) of this.
    pub mscale_all_dim: Option<f64>,
}

impl RopeScaling {
    /// The frequencies of `channels` channels: `base^(−2i / channels)`, scaled.
    pub fn frequencies(&self, base: f32, channels: usize) -> Vec<f32> {
        let mut base = f64::from(base);
        if let RopeScaling::RaisedBase(factor) = self {
            let channels = channels as f64;
            base *= factor.powf(channels / (channels - 2.0));
        }
        let plain = (0..channels / 2).map(|i| base.powf(-2.0 * i as f64 / channels as f64));
        let stretched = |(i, f): (usize, f64)| match self {
            RopeScaling::Plain | RopeScaling::RaisedBase(_) | RopeScaling::Listed { .. } => f,
            RopeScaling::Linear(factor) => f / factor,
            RopeScaling::Llama3(llama3) => llama3.stretch(f),
            RopeScaling::Yarn(yarn) => yarn.stretch(i, f, base, channels),
            RopeScaling::Proportional { share, factor } => {
                let rotates = i < (share * channels as f64 / 2.0) as usize;
                if rotates { f / factor } else { 0.0 }
            }
        };
        plain.enumerate().map(|f| stretched(f) as f32).collect()
    }

    /// The factor of cosine and sine.
    pub fn scale(&self) -> f32 {
        match self {
            RopeScaling::Plain
            | RopeScaling::Linear(_)
            | RopeScaling::Llama3(_)
            | RopeScaling::RaisedBase(_)
            | RopeScaling::Proportional { .. } => 1.0,
            RopeScaling::Yarn(yarn) => yarn.scale as f32,
            RopeScaling::Listed { scale, .. } => *scale as f32,
        }
    }
}

impl Llama3 {
    fn stretch(&self, f: f64) -> f64 {
        let turns = self.original * f / TAU;
        let fast = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        f / self.factor * (1.0 - fast) + f * fast
    }
}

impl Yarn {
    fn stretch(&self, i: usize, f: f64, base: f64, channels: usize) -> f64 {
        let channels = channels as f64;
        // The index of the frequency with this number of rotations in the original context.
        let border = |turns: f64| channels * (self.original / (turns * TAU)).ln() / (2.0 * base.ln());
        let (mut first, mut last) = (border(self.beta_fast), border(self.beta_slow));
        if self.round {
            (first, last) = (first.floor(), last.ceil());
        }
        (first, last) = (first.max(0.0), last.min(channels - 1.0));
        if first == last {
            last += 0.001;
        }
        let slow = ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
        f / self.factor * slow + f * (1.0 - slow)
    }

    /// The growth of cosine and sine with the context; `mscale` sets its strength.
    pub fn magnitude(factor: f64, mscale: f64) -> f64 {
        if factor > 1.0 { 0.1 * mscale * factor.ln() + 1.0 } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(ours: &[f32], truth: &[f64]) {
        assert_eq!(ours.len(), truth.len());
        for (&ours, &truth) in ours.iter().zip(truth) {
            assert!((f64::from(ours) - truth).abs() <= 1e-6 * truth, "{ours} instead of {truth}");
        }
    }

    #[test]
    fn frequencies_fall_from_one_by_equal_factors() {
        assert_close(&RopeScaling::Plain.frequencies(10_000.0, 8), &[1.0, 0.1, 0.01, 0.001]);
        assert_close(&RopeScaling::Linear(4.0).frequencies(10_000.0, 8), &[0.25, 0.025, 0.0025, 0.00025]);
    }

    #[test]
    fn proportional_frequencies_are_those_of_the_whole_head() {
        let proportional = RopeScaling::Proportional { share: 0.5, factor: 2.0 };
        assert_close(&proportional.frequencies(10_000.0, 8), &[0.5, 0.05, 0.0, 0.0]);
        let proportional = RopeScaling::Proportional { share: 0.45, factor: 1.0 };
        assert_close(&proportional.frequencies(10_000.0, 8), &[1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn llama3_divides_slow_frequencies() {
        let llama3 = Llama3 { factor: 8.0, original: 1000.0, low: 1.0, high: 4.0 };
        // The frequencies rotate 159, 15.9, 1.59 and 0.159 times.
        let fast = (10.0 / TAU - 1.0) / 3.0;
        let between = 0.01 * (fast + (1.0 - fast) / 8.0);
        let ours = RopeScaling::Llama3(llama3).frequencies(10_000.0, 8);
        assert_close(&ours, &[1.0, 0.1, between, 0.001 / 8.0]);
    }

    #[test]
    fn yarn_divides_frequencies_with_a_high_index() {
        let yarn = Yarn {
            factor: 8.0,
            original: 1000.0 * TAU,
            beta_fast: 32.0,
            beta_slow: 0.2,
            round: true,
            scale: Yarn::magnitude(8.0, 1.0),
            mscale_all_dim: None,
        };
        // The boundaries are the indices 1.49 and 3.7, rounded to 1 and 4.
        let mix = |f: f64, slow: f64| f / 8.0 * slow + f * (1.0 - slow);
        let ours = RopeScaling::Yarn(yarn).frequencies(10_000.0, 8);
        assert_close(&ours, &[1.0, 0.1, mix(0.01, 1.0 / 3.0), mix(0.001, 2.0 / 3.0)]);
        assert!((RopeScaling::Yarn(yarn).scale() - 1.207_944_2).abs() < 1e-6);

        let [first, last] = [32.0f64, 0.2].map(|turns| (1000.0 / turns).log10());
        let slow = |i: f64| (i - first) / (last - first);
        let ours = RopeScaling::Yarn(Yarn { round: false, ..yarn }).frequencies(10_000.0, 8);
        assert_close(&ours, &[1.0, 0.1, mix(0.01, slow(2.0)), mix(0.001, slow(3.0))]);
    }

    #[test]
    fn boundaries_outside_the_frequencies_are_clamped() {
        let yarn = Yarn {
            factor: 4.0,
            original: 8.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            round: true,
            scale: 1.0,
            mscale_all_dim: None,
        };
        // Even the first frequency rotates less than twice: all from the second on are slow.
        let ours = RopeScaling::Yarn(yarn).frequencies(10_000.0, 8);
        assert_close(&ours, &[1.0, 0.1 / 4.0, 0.01 / 4.0, 0.001 / 4.0]);
        assert_eq!(Yarn::magnitude(0.5, 1.0), 1.0);
    }
}
