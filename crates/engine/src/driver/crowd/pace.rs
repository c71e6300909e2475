//! Limits how many prompt tokens a pass computes beside generating requests, so that these do not wait long.

use std::time::Duration;

/// A pass computes at least this many prompt tokens, whatever time that takes.
const LEAST: usize = 32;

/// The weight of the newest pass in the averages.
const NEWEST: f64 = 0.2;

/// If even the smallest part takes longer than the target, a part may take longer by this factor. Generating requests
/// hardly notice, but the prompt gains much: most of the time goes into reading experts, which more tokens share.
const NO_MATTER: f64 = 1.25;

/// A linear model of the time of passes over their number of prompt tokens, learned while running.
pub struct Pace {
    target: f64,
    /// Weighted means, with the newest pass weighted most. Zero before the first one.
    tokens: f64,
    seconds: f64,
    /// Weighted variance of tokens, and covariance of tokens and seconds.
    spread: f64,
    together: f64,
    /// Seconds for each additional token.
    slope: f64,
    /// Tokens of the newest pass.
    newest: f64,
}

impl Pace {
    /// A model without measurements.
    pub fn new(target: Duration) -> Pace {
        let target = target.as_secs_f64();
        Pace { target, tokens: 0.0, seconds: 0.0, spread: 0.0, together: 0.0, slope: 0.0, newest: 0.0 }
    }

    /// Adds the measurement of one pass.
    pub fn learn(&mut self, tokens: usize, seconds: f64) {
        if tokens < LEAST {
            // A few tokens use few experts, which tells nothing about many tokens.
            return;
        }
        let tokens = tokens as f64;
        self.newest = tokens;
        if self.tokens == 0.0 {
            (self.tokens, self.seconds, self.slope) = (tokens, seconds, seconds / tokens);
            return;
        }
        let (more, longer) = (tokens - self.tokens, seconds - self.seconds);
        self.tokens += NEWEST * more;
        self.seconds += NEWEST * longer;
        self.spread = (1.0 - NEWEST) * (self.spread + NEWEST * more * more);
        self.together = (1.0 - NEWEST) * (self.together + NEWEST * more * longer);
        // Passes of the same size tell nothing about other sizes.
        if self.spread > (0.1 * self.tokens).powi(2) {
            self.slope = self.together / self.spread;
        }
    }

    /// The number of prompt tokens for a pass in which other requests generate.
    pub fn share(&self) -> usize {
        if self.tokens == 0.0 {
            return LEAST;
        }
        // Never far beyond the sizes that were measured.
        let most = (2.0 * self.newest.max(self.tokens)).max(LEAST as f64);
        let least = self.seconds + self.slope * (LEAST as f64 - self.tokens);
        let allowed = self.target.max(NO_MATTER * least);
        let share = match self.slope > 0.0 {
            true => self.tokens + (allowed - self.seconds) / self.slope,
            false if self.seconds <= allowed => most,
            false => LEAST as f64,
        };
        share.clamp(LEAST as f64, most) as usize
    }
}

/// Divides `room` tokens among prompts with these needs, in order of arrival. Tokens that one prompt does not need go
/// to the others. The first prompt always gets some.
pub fn divide(room: usize, needs: &[usize]) -> Vec<usize> {
    let mut shares = vec![0; needs.len()];
    let mut order: Vec<usize> = (0..needs.len()).collect();
    if let Some(others) = order.get_mut(1..) {
        others.sort_by_key(|&i| needs[i]);
    }
    let mut left = room;
    if let Some(&first) = order.first() {
        shares[first] = needs[first].min(left.div_ceil(needs.len()));
        left -= shares[first];
    }
    for (done, &i) in order.iter().enumerate().skip(1) {
        shares[i] = needs[i].min(left.div_ceil(needs.len() - done));
        left -= shares[i];
    }
    // The first prompt got its part before the rest was known.
    if let Some(&first) = order.first() {
        shares[first] += left.min(needs[first] - shares[first]);
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates passes until their size settles. Returns that size.
    fn settled(mut seconds: impl FnMut(usize) -> f64) -> usize {
        let mut pace = Pace::new(Duration::from_millis(500));
        for _ in 0..200 {
            let share = pace.share();
            pace.learn(share, seconds(share));
        }
        pace.share()
    }

    #[test]
    fn passes_take_the_time_they_should() {
        let size = settled(|tokens| 0.1 + 0.001 * tokens as f64);
        assert!((350..=450).contains(&size), "{size}");
        let mut noise = [0.9, 1.1, 1.0, 1.2, 0.8].into_iter().cycle();
        let size = settled(|tokens| (0.1 + 0.001 * tokens as f64) * noise.next().unwrap());
        assert!((200..=600).contains(&size), "{size}");
    }

    #[test]
    fn a_slow_machine_gets_on_all_the_same() {
        let size = settled(|tokens| tokens as f64);
        assert!((LEAST..=LEAST * 5 / 4).contains(&size), "{size}");
    }

    /// A few tokens read as many experts as many tokens do.
    #[test]
    fn where_time_does_not_depend_on_tokens_a_pass_takes_many() {
        let size = settled(|tokens| 4.0 + 0.001 * tokens as f64);
        assert!((700..=1300).contains(&size), "{size}");
    }

    #[test]
    fn a_machine_that_becomes_slower_is_noticed() {
        let mut pace = Pace::new(Duration::from_millis(500));
        pace.learn(2000, 1.0);
        assert_eq!(pace.share(), 1000);
        for _ in 0..50 {
            pace.learn(pace.share(), 0.01 * pace.share() as f64);
        }
        assert!((40..=60).contains(&pace.share()), "{}", pace.share());
    }

    #[test]
    fn a_short_prompt_does_not_wait_for_a_long_one() {
        assert_eq!(divide(100, &[1000, 20]), [80, 20]);
        assert_eq!(divide(100, &[1000, 1000]), [50, 50]);
        assert_eq!(divide(100, &[10, 20]), [10, 20]);
        assert_eq!(divide(100, &[10, 1000, 20, 1000]), [10, 35, 20, 35]);
        assert_eq!(divide(2, &[9, 1, 1, 1]), [1, 1, 0, 0]);
        assert!(divide(5, &[]).is_empty());
        assert_eq!(divide(0, &[3]), [0]);
    }
}
