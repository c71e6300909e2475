//! Estimates from the routers' weights which experts a model prefers. The larger the norm of an expert's row, the further
//! its scores are from zero, and the more often it is chosen, whatever the token. This reads only a few routers.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use crate::synth::gaussian;

/// The number of layers whose routers are read: enough for an average.
pub(crate) const LAYERS: usize = 8;

/// Random tokens per layer.
const TOKENS: usize = 1000;

/// How often each expert is among the `used` best, as a share of all choices, for random hidden states of any direction
/// and router rows with these norms.
pub(crate) fn preferences(lengths: &[f32], used: usize) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let used = used.clamp(1, lengths.len());
    let mut counts = vec![0u32; lengths.len()];
    let mut scores: Vec<(f32, usize)> = Vec::with_capacity(lengths.len());
    for _ in 0..TOKENS {
        scores.clear();
        scores.extend(lengths.iter().map(|length| length * gaussian(&mut rng)).zip(0..));
        scores.select_nth_unstable_by(used - 1, |a, b| b.0.total_cmp(&a.0));
        scores[..used].iter().for_each(|&(_, expert)| counts[expert] += 1);
    }
    counts.into_iter().map(|count| count as f32 / (TOKENS * used) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_rows_are_chosen_more_often() {
        let even = preferences(&[1.0; 32], 4);
        assert!(even.iter().all(|&share| (share - 1.0 / 32.0).abs() < 0.01), "{even:?}");
        let mut lengths = [1.0; 32];
        (lengths[3], lengths[9]) = (3.0, 0.0);
        let uneven = preferences(&lengths, 4);
        assert!((uneven.iter().sum::<f32>() - 1.0).abs() < 1e-4);
        assert!(uneven[3] > 2.5 * uneven[0] && uneven[9] < 0.01, "{uneven:?}");
        assert_eq!(preferences(&[1.0, 2.0], 2), [0.5, 0.5], "all are used");
    }
}
