//! Comparing numbers. A NaN is neither larger nor smaller than any number, and `f64::max` drops it. So these functions
//! treat a number that is not finite as infinitely far from every other.

/// The distance of `ours` from `truth`, relative to the truth's norm: ‖ours − truth‖ / ‖truth‖. Infinite if any number
/// on either side is not finite, or if the truth is all zeros.
#[track_caller]
pub fn relative_error<A, B>(ours: &[A], truth: &[B]) -> f64
where
    A: Copy + Into<f64>,
    B: Copy + Into<f64>,
{
    assert_eq!(ours.len(), truth.len(), "there are more numbers on one side");
    let square = |v: f64| v * v;
    let difference: f64 = ours.iter().zip(truth).map(|(&a, &b)| square(a.into() - b.into())).sum();
    let norm: f64 = truth.iter().map(|&b| square(b.into())).sum();
    finite_or_far((difference / norm).sqrt())
}

/// The largest of several errors; infinite if one of them is NaN.
pub fn worst(errors: impl IntoIterator<Item = f64>) -> f64 {
    errors.into_iter().map(finite_or_far).fold(0.0, f64::max)
}

/// Asserts that two results have the same bits, including the signs of zeros, and that all numbers are finite: two
/// kernels that both return NaN may both be wrong.
#[track_caller]
pub fn assert_same_bits(ours: &[f32], truth: &[f32], what: &str) {
    assert_eq!(ours.len(), truth.len(), "{what}: there are more numbers on one side");
    assert!(!truth.is_empty(), "{what}: there is nothing to compare");
    for (i, (ours, truth)) in ours.iter().zip(truth).enumerate() {
        assert!(ours.to_bits() == truth.to_bits(), "{what}: element {i} is {ours:e} instead of {truth:e}");
        assert!(truth.is_finite(), "{what}: element {i} is {truth} on both sides");
    }
}

fn finite_or_far(error: f64) -> f64 {
    if error.is_finite() { error } else { f64::INFINITY }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_to_the_truth() {
        assert_eq!(relative_error(&[3.0f32, 4.0], &[3.0f64, 4.0]), 0.0);
        assert_eq!(relative_error(&[3.0f32, 5.0], &[0.0f32, 5.0]), 0.6);
        assert_eq!(worst([0.1, 0.3, 0.2]), 0.3);
    }

    #[test]
    fn what_is_not_finite_is_infinitely_far() {
        for strange in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (ours, truth) in
                [([1.0, strange], [1.0, 2.0]), ([1.0, 2.0], [1.0, strange]), ([strange; 2], [strange; 2])]
            {
                assert_eq!(relative_error(&ours, &truth), f64::INFINITY, "{ours:?}, {truth:?}");
                assert!(std::panic::catch_unwind(|| assert_same_bits(&ours, &truth, "strange")).is_err());
            }
            assert_eq!(worst([0.1, strange.into(), 0.2]), f64::INFINITY);
        }
        assert_eq!(relative_error(&[0.0f32], &[0.0f32]), f64::INFINITY);
    }

    #[test]
    fn results_of_other_lengths_are_no_results() {
        for (ours, truth) in
            [(&[1.0f32][..], &[1.0f32, 1.0][..]), (&[1.0, 1.0], &[1.0]), (&[], &[1.0]), (&[], &[])]
        {
            assert!(std::panic::catch_unwind(|| assert_same_bits(ours, truth, "lengths")).is_err());
        }
        assert!(std::panic::catch_unwind(|| relative_error(&[1.0f32], &[1.0f32, 1.0])).is_err());
        assert_eq!(relative_error::<f32, f32>(&[], &[]), f64::INFINITY);
    }

    #[test]
    fn zeros_have_signs() {
        assert_same_bits(&[0.0, -0.0, 1.5], &[0.0, -0.0, 1.5], "the same");
        assert!(std::panic::catch_unwind(|| assert_same_bits(&[0.0], &[-0.0], "signs")).is_err());
    }
}
