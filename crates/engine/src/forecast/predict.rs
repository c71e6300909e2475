//! Predicts the speed of generation before a model is loaded: a range, because it depends on the experts that a
//! conversation uses.

use crate::forecast::preference::preferences;
use crate::forecast::rehearsal::ComputeTime;

/// A low, a middle and a high value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// In a bad case.
    pub low: f64,
    /// As expected.
    pub middle: f64,
    /// In a good case.
    pub high: f64,
}

impl Range {
    fn each(f: impl Fn(usize) -> f64) -> Range {
        Range { low: f(0), middle: f(1), high: f(2) }
    }
}

/// How unevenly a model uses its experts.
#[derive(Clone, Debug, PartialEq)]
pub enum Skew {
    /// How much its routers prefer each expert, most preferred first; empty if unknown.
    Expected(Vec<f32>),
    /// How often each expert was used in earlier runs, most used first.
    Known(Vec<f32>),
}

/// If the routers' preferences alone would give the experts in memory a share `s` of the choices, the hit rate is
/// `1 - (1 - s)^k`, because a conversation repeats experts. These values of `k` fit the recorded traces
/// (docs/performance-cache.md).
const LOCALITY: [f64; 3] = [1.2, 1.6, 2.0];

/// Misses, as a multiple of those that the heat of earlier runs predicts: the next conversation may have another topic.
const OTHER_TOPIC: [f64; 3] = [1.5, 1.0, 0.6];

/// The time of computing, as a multiple of the time of the products alone. Norms, attention over a short context and
/// synchronisation of the threads add to it; on a busy machine they add more.
const BESIDES: [f64; 3] = [1.45, 1.2, 1.0];

/// The additional time of computing experts if all of them have to be read, as a multiple of the time of their products: reading
/// uses CPU time and memory bandwidth.
const BESIDE_READS: [f64; 3] = [1.3, 0.9, 0.5];

/// The drive's speed, as a share of its speed in a probe that does nothing but read.
const DRIVE_SHARE: [f64; 3] = [0.65, 0.85, 1.0];

impl Skew {
    /// From the heat of earlier runs, if there is any.
    pub fn known(mut heat: Vec<f32>) -> Option<Skew> {
        heat.sort_by(|a, b| b.total_cmp(a));
        heat.iter().any(|&h| h > 0.0).then_some(Skew::Known(heat))
    }

    /// From the row lengths of some routers, each with the number of experts that a token uses.
    pub fn of_routers(routers: &[(Vec<f32>, usize)]) -> Skew {
        let preferences = routers.iter().flat_map(|(lengths, used)| preferences(lengths, *used));
        let mut preferences: Vec<f32> = preferences.collect();
        preferences.sort_by(|a, b| b.total_cmp(a));
        Skew::Expected(preferences)
    }

    /// The predicted hit rate with slots for this share of all experts.
    pub fn hit_rate(&self, share: f64) -> Range {
        if share >= 1.0 {
            return Range::each(|_| 1.0);
        }
        let of_hottest = |heat: &[f32]| {
            let slots = (heat.len() as f64 * share) as usize;
            let sum = |heat: &[f32]| heat.iter().map(|&h| f64::from(h)).sum::<f64>();
            sum(&heat[..slots]) / sum(heat)
        };
        match self {
            Skew::Expected(preferences) => {
                let chosen = if preferences.is_empty() { share } else { of_hottest(preferences).max(share) };
                Range::each(|i| 1.0 - (1.0 - chosen).powf(LOCALITY[i]))
            }
            Skew::Known(heat) => {
                let missed = 1.0 - of_hottest(heat);
                // In the worst case, experts are used without any preference.
                Range::each(|i| 1.0 - (missed * OTHER_TOPIC[i]).min(1.0 - share))
            }
        }
    }
}

/// The speed of the drive, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriveSpeed {
    /// With one expert at a time.
    pub one: f64,
    /// With `together` experts at a time.
    pub many: f64,
    /// The number of experts in that measurement.
    pub together: usize,
}

impl DriveSpeed {
    /// Seconds to read `count` experts of `bytes` bytes each that are requested together.
    fn seconds(&self, count: f64, bytes: f64) -> f64 {
        let (first, together) = (bytes / self.one, self.together as f64);
        let all = (together * bytes / self.many).max(first);
        if count <= 1.0 || self.together <= 1 {
            count * first
        } else if count <= together {
            first + (all - first) * (count - 1.0) / (together - 1.0)
        } else {
            all * count / together
        }
    }

    /// A drive that is `factor` times as fast.
    pub fn times(&self, factor: f64) -> DriveSpeed {
        DriveSpeed { one: self.one * factor, many: self.many * factor, ..*self }
    }
}

/// The input of a prediction: a model on a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Outlook {
    /// Seconds of a token's matrix products.
    pub compute: ComputeTime,
    /// The speed of the drive with the experts; `None` if the model has no experts.
    pub drive: Option<DriveSpeed>,
    /// The number of layers with experts.
    pub layers: usize,
    /// Experts used per token in each of these layers.
    pub used: f64,
    /// Bytes of an expert.
    pub expert_bytes: f64,
    /// How unevenly experts are used.
    pub skew: Skew,
}

/// A prediction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// The hit rate.
    pub hit_rate: Range,
    /// Tokens per second.
    pub speed: Range,
    /// The share of the expected time that is spent waiting for the drive.
    pub waiting: f64,
}

impl Outlook {
    /// The prediction for slots for this share of all experts, once the cache is warm.
    pub fn predict(&self, share: f64) -> Prediction {
        let hit_rate = self.skew.hit_rate(share);
        let seconds = |i: usize, hits: f64| {
            let dense = self.compute.dense * BESIDES[i];
            let experts = self.compute.experts * (BESIDES[i] + BESIDE_READS[i] * (1.0 - hits));
            (dense + experts, self.waiting(hits, experts, DRIVE_SHARE[i]))
        };
        let times = [seconds(0, hit_rate.low), seconds(1, hit_rate.middle), seconds(2, hit_rate.high)];
        Prediction {
            hit_rate,
            speed: Range::each(|i| 1.0 / (times[i].0 + times[i].1)),
            waiting: times[1].1 / (times[1].0 + times[1].1),
        }
    }

    /// Seconds per token of waiting with nothing to compute. While a layer's missing experts are read, its other experts
    /// are computed. The reads of one layer run at the same time and end together. Misses are assumed to be independent:
    /// some layers have several, others none.
    fn waiting(&self, hits: f64, compute: f64, drive_share: f64) -> f64 {
        let Some(drive) = self.drive.filter(|_| self.layers > 0 && hits < 1.0) else { return 0.0 };
        let drive = drive.times(drive_share);
        let one = compute / (self.layers as f64 * self.used);
        let used = (self.used.round() as u32).max(1);
        // The probability that a layer misses this many of its experts.
        let mut probability = hits.powi(used as i32);
        let mut seconds = 0.0;
        for missed in 1..=used {
            probability = if hits > 0.0 {
                probability * f64::from(used - missed + 1) / f64::from(missed) * (1.0 - hits) / hits
            } else {
                f64::from(u8::from(missed == used))
            };
            let read = drive.seconds(f64::from(missed), self.expert_bytes);
            seconds += probability * (read - one * f64::from(used - missed)).max(0.0);
        }
        self.layers as f64 * seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outlook(skew: Skew) -> Outlook {
        Outlook {
            compute: ComputeTime { dense: 0.01, experts: 0.02 },
            drive: Some(DriveSpeed { one: 1e9, many: 4e9, together: 8 }),
            layers: 10,
            used: 4.0,
            expert_bytes: 4e6,
            skew,
        }
    }

    #[test]
    fn what_is_expected_is_what_the_recorded_traces_have() {
        // The deviations of the logarithms of the lengths of their routers' rows, and the hits at 10 to 50 %.
        let recorded = [
            (0.22, [0.229, 0.407, 0.550, 0.768]),
            (0.04, [0.134, 0.264, 0.382, 0.571]),
            (0.08, [0.174, 0.313, 0.453, 0.656]),
        ];
        for (deviation, hits) in recorded {
            // Sixteen numbers whose deviation is about one.
            let lengths = (0..16).map(|i| (deviation * (f64::from(i) - 7.5) / 4.6).exp() as f32).collect();
            let skew = Skew::of_routers(&[(lengths, 4)]);
            for (share, hits) in [0.1, 0.2, 0.3, 0.5].into_iter().zip(hits) {
                let Range { low, middle, high } = skew.hit_rate(share);
                assert!(low - 0.05 < hits && hits < high + 0.05, "{deviation} {share}: {low} {hits} {high}");
                assert!(low < middle && middle < high);
            }
        }
        let unknown = Skew::of_routers(&[]);
        assert_eq!(unknown.hit_rate(1.0), Range { low: 1.0, middle: 1.0, high: 1.0 });
        assert!(unknown.hit_rate(0.3).low > 0.3);
    }

    #[test]
    fn heat_tells_what_the_hottest_are_worth() {
        let skew = Skew::known(vec![0.1, 0.5, 0.0, 0.4]).unwrap();
        let Range { low, middle, high } = skew.hit_rate(0.5);
        assert!((middle - 0.9).abs() < 1e-6, "{middle}");
        assert!((low - 0.85).abs() < 1e-6 && (high - 0.94).abs() < 1e-6);
        let even = Skew::known(vec![1.0; 10]).unwrap();
        assert!(even.hit_rate(0.3).low >= 0.3 - 1e-6, "never below use without preference");
        assert_eq!(Skew::known(vec![0.0; 4]), None);
        assert_eq!(Skew::known(Vec::new()), None);
    }

    #[test]
    fn more_memory_and_faster_drives_help_until_computing_binds() {
        let outlook = outlook(Skew::of_routers(&[]));
        let speeds: Vec<Range> = [0.05, 0.2, 0.5, 1.0].map(|share| outlook.predict(share).speed).into();
        for pair in speeds.windows(2) {
            assert!(pair[0].low < pair[1].low && pair[0].middle < pair[1].middle);
        }
        assert!(speeds.iter().all(|s| s.low < s.middle && s.middle < s.high));
        let resident = outlook.predict(1.0);
        assert_eq!(resident.waiting, 0.0);
        assert!((resident.speed.high - 1.0 / (0.03 * BESIDES[2])).abs() < 1e-9);
        let fast = Outlook { drive: outlook.drive.map(|d| d.times(1e6)), ..outlook.clone() };
        assert!(outlook.predict(0.2).waiting > 0.0);
        assert!(fast.predict(0.2).waiting < 1e-3);
        assert!(fast.predict(0.2).speed.middle > outlook.predict(0.2).speed.middle);
    }

    #[test]
    fn one_expert_takes_its_time_and_several_share_it() {
        let drive = DriveSpeed { one: 1e9, many: 4e9, together: 8 };
        assert_eq!(drive.seconds(0.5, 1e9), 0.5);
        assert_eq!(drive.seconds(1.0, 1e9), 1.0);
        assert_eq!(drive.seconds(8.0, 1e9), 2.0);
        assert_eq!(drive.seconds(16.0, 1e9), 4.0);
        // A probe that was disturbed may say that eight together are slower than eight times one.
        assert!(DriveSpeed { many: 1e9 / 2.0, ..drive }.seconds(8.0, 1e9) == 16.0);
    }
}
