//! How fast tokens will be written, before anything is loaded: a range, because nobody knows what will be asked.

use crate::rehearsal::ComputeTime;

/// A low, a middle and a high value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// If things go badly.
    pub low: f64,
    /// What is expected.
    pub middle: f64,
    /// If things go well.
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
    /// As the trained models whose traces were recorded do (docs/streaming.md).
    Typical,
    /// How hot each expert was in earlier runs, the hottest first.
    Known(Vec<f32>),
}

/// With a share `s` of the experts in memory, trained models hit about `1 - (1 - s)^k`. The recorded ones lie between the
/// first and the last; use without any preference would be 1.
const TYPICAL: [f64; 3] = [1.3, 1.8, 2.4];

/// How many misses there are for every one that the heat of earlier runs lets expect: the next conversation is about
/// something else.
const OTHER_TOPIC: [f64; 3] = [1.5, 1.0, 0.6];

/// The time of computing, as a multiple of that of the products alone. Norms, attention over a short context and the
/// threads' waiting for each other come to it; a busy machine has less to give.
const BESIDES: [f64; 3] = [1.45, 1.2, 1.0];

/// The drive's speed, as a share of what a probe gets that does nothing else.
const DRIVE_SHARE: [f64; 3] = [0.65, 0.85, 1.0];

impl Skew {
    /// From the heat of earlier runs, if there is any.
    pub fn of(heat: Option<Vec<f32>>) -> Skew {
        match heat {
            Some(mut heat) if heat.iter().any(|&h| h > 0.0) => {
                heat.sort_by(|a, b| b.total_cmp(a));
                Skew::Known(heat)
            }
            _ => Skew::Typical,
        }
    }

    /// The share of a token's experts that is in memory when there are slots for this share of all.
    pub fn hit_rate(&self, share: f64) -> Range {
        if share >= 1.0 {
            return Range::each(|_| 1.0);
        }
        match self {
            Skew::Typical => Range::each(|i| 1.0 - (1.0 - share).powf(TYPICAL[i])),
            Skew::Known(heat) => {
                let slots = (heat.len() as f64 * share) as usize;
                let sum = |heat: &[f32]| heat.iter().map(|&h| f64::from(h)).sum::<f64>();
                let missed = 1.0 - sum(&heat[..slots]) / sum(heat);
                // No guess is worse than use without any preference.
                Range::each(|i| 1.0 - (missed * OTHER_TOPIC[i]).min(1.0 - share))
            }
        }
    }
}

/// Bytes a second that the drive delivers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriveSpeed {
    /// When one expert is read at a time.
    pub one: f64,
    /// When `together` are.
    pub many: f64,
    /// How many those were.
    pub together: usize,
}

impl DriveSpeed {
    /// Seconds until `count` experts of so many bytes have arrived that were asked for together.
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

    /// The same drive, so many times as fast.
    pub fn times(&self, factor: f64) -> DriveSpeed {
        DriveSpeed { one: self.one * factor, many: self.many * factor, ..*self }
    }
}

/// What is known of a model on a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Outlook {
    /// Seconds of a token's products.
    pub compute: ComputeTime,
    /// Of the experts' drive; `None` where the model has none.
    pub drive: Option<DriveSpeed>,
    /// Layers that have experts.
    pub layers: usize,
    /// Experts that a token uses in such a layer.
    pub used: f64,
    /// Bytes of an expert.
    pub expert_bytes: f64,
    /// Which experts are used.
    pub skew: Skew,
}

/// What a token will take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// The share of a token's experts that is in memory.
    pub hit_rate: Range,
    /// Tokens a second.
    pub speed: Range,
    /// The share of the middle time in which a drive is waited for.
    pub waiting: f64,
}

impl Outlook {
    /// With slots for this share of all experts, in a conversation that has gone on for a while.
    pub fn predict(&self, share: f64) -> Prediction {
        let hit_rate = self.skew.hit_rate(share);
        let seconds = |i: usize, hits: f64| {
            let (dense, experts) = (self.compute.dense * BESIDES[i], self.compute.experts * BESIDES[i]);
            (dense + experts, self.waiting(hits, experts, DRIVE_SHARE[i]))
        };
        let times = [seconds(0, hit_rate.low), seconds(1, hit_rate.middle), seconds(2, hit_rate.high)];
        Prediction {
            hit_rate,
            speed: Range::each(|i| 1.0 / (times[i].0 + times[i].1)),
            waiting: times[1].1 / (times[1].0 + times[1].1),
        }
    }

    /// Seconds of a token in which nothing is computed because no expert has arrived. In a layer that misses some, the
    /// others are computed while they are read, and the last to arrive is computed after that.
    fn waiting(&self, hits: f64, compute: f64, drive_share: f64) -> f64 {
        let Some(drive) = self.drive.filter(|_| self.layers > 0 && hits < 1.0) else { return 0.0 };
        let missed = self.used * (1.0 - hits);
        // Misses come by themselves: some layers have several, others none.
        let layers = 1.0 - (-missed).exp();
        let read = drive.times(drive_share).seconds(missed / layers, self.expert_bytes);
        let computed = compute / self.layers as f64;
        let last = computed / self.used;
        self.layers as f64 * layers * (read + last - computed).max(0.0)
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
    fn typical_use_is_that_of_the_recorded_traces() {
        for (share, lowest, highest) in
            [(0.1, 0.134, 0.229), (0.2, 0.264, 0.407), (0.3, 0.382, 0.55), (0.5, 0.571, 0.768)]
        {
            let Range { low, middle, high } = Skew::Typical.hit_rate(share);
            assert!((low - lowest).abs() < 0.04 && (high - highest).abs() < 0.05, "{share}: {low} {high}");
            assert!(low < middle && middle < high);
        }
        assert_eq!(Skew::Typical.hit_rate(1.0), Range { low: 1.0, middle: 1.0, high: 1.0 });
    }

    #[test]
    fn heat_tells_what_the_hottest_are_worth() {
        let skew = Skew::of(Some(vec![0.1, 0.5, 0.0, 0.4]));
        let Range { low, middle, high } = skew.hit_rate(0.5);
        assert!((middle - 0.9).abs() < 1e-6, "{middle}");
        assert!((low - 0.85).abs() < 1e-6 && (high - 0.94).abs() < 1e-6);
        let even = Skew::of(Some(vec![1.0; 10]));
        assert!(even.hit_rate(0.3).low >= 0.3 - 1e-6, "never below use without preference");
        assert_eq!(Skew::of(Some(vec![0.0; 4])), Skew::Typical);
        assert_eq!(Skew::of(None), Skew::Typical);
    }

    #[test]
    fn more_memory_and_faster_drives_help_until_computing_binds() {
        let outlook = outlook(Skew::Typical);
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
        assert_eq!(fast.predict(0.2).speed.middle, fast.predict(1.0).speed.middle);
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
