//! Rotary frequencies.

/// Plain rotary embedding over `channels` channels: `base^(−2i / channels)`.
///
/// Computed in f64 and rounded once, which is what the f32 reference comes to within a rounding.
pub fn plain_frequencies(base: f32, channels: usize) -> Vec<f32> {
    let exponent = |i: usize| -2.0 * i as f64 / channels as f64;
    (0..channels / 2).map(|i| f64::from(base).powf(exponent(i)) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_fall_from_one_by_equal_factors() {
        let f = plain_frequencies(10_000.0, 8);
        for (f, truth) in f.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((f - truth).abs() < 1e-7 * truth, "{f} instead of {truth}");
        }
        assert_eq!(f.len(), 4);
    }
}
