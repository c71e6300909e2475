//! Scalar functions with fixed bits.
//!
//! The C library's `expf` differs between platforms and has no vector form. So this exponential is a short sequence of
//! IEEE operations that every instruction set can repeat exactly.

/// `e^x`, within two units in the last place; 0 below −87.3, infinity above 88.7, NaN for NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // x = n·ln 2 + r with |r| ≤ ln 2 / 2; ln 2 in two parts keeps r exact.
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let mut p = EXP_POLYNOMIAL[0];
    for c in &EXP_POLYNOMIAL[1..] {
        p = p.mul_add(r, *c);
    }
    if x < EXP_LOWEST {
        0.0
    } else if x > EXP_HIGHEST {
        f32::INFINITY
    } else {
        // n is at most 128 here; two factors keep each exponent in range.
        let n = n as i32;
        let half = n >> 1;
        p * power_of_two(half) * power_of_two(n - half)
    }
}

/// `1 / (1 + e^−x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x · sigmoid(x)`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// The hyperbolic tangent, within `2e-7`.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let t = exp(-2.0 * x.abs());
    ((1.0 - t) / (1.0 + t)).copysign(x)
}

/// `ln(1 + e^x)`, within four units in the last place.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    // ln(1 + t) = 2 artanh(t / (2 + t)), whose argument is at most a third.
    let t = exp(-x.abs());
    let s = t / (2.0 + t);
    let square = s * s;
    let mut p = ARTANH_SERIES[0];
    for c in &ARTANH_SERIES[1..] {
        p = p.mul_add(square, *c);
    }
    (2.0 * s).mul_add(p, x.max(0.0))
}

/// `artanh(s) / s` in powers of `s²`, highest first.
const ARTANH_SERIES: [f32; 8] =
    [1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0, 1.0];

pub(crate) const LN2_HIGH: f32 = 0.693_359_4;
pub(crate) const LN2_LOW: f32 = -2.121_944_4e-4;
/// Below this the result would not be a normal number.
pub(crate) const EXP_LOWEST: f32 = -87.336_54;
/// Above this the result would overflow.
pub(crate) const EXP_HIGHEST: f32 = 88.722_84;
/// `e^r` on |r| ≤ ln 2 / 2, highest power first.
pub(crate) const EXP_POLYNOMIAL: [f32; 7] =
    [1.388_888_9e-3, 8.333_334e-3, 4.166_666_6e-2, 1.666_666_7e-1, 0.5, 1.0, 1.0];

#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use forebay_testing::worst;

    use super::*;

    /// The largest relative error of a function between two numbers.
    fn worst_error(ours: fn(f32) -> f32, truth: fn(f64) -> f64, from: f32, to: f32) -> f64 {
        let error = |x: f32| (f64::from(ours(x)) - truth(x.into())).abs() / truth(x.into());
        worst(std::iter::successors(Some(from), |x| Some(x + 0.000_937)).take_while(|&x| x < to).map(error))
    }

    #[test]
    fn exp_is_close_to_the_true_value_everywhere() {
        let worst = worst_error(exp, f64::exp, -87.3, 88.7);
        assert!(worst < 2.4e-7, "relative error {worst}");
    }

    #[test]
    fn exp_has_the_exact_values_that_softmax_relies_on() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-88.0), 0.0);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn softplus_is_close_to_the_true_value_everywhere() {
        let worst = worst_error(softplus, |x| x.exp().ln_1p(), -80.0, 100.0);
        assert!(worst < 4.8e-7, "relative error {worst}");
        assert_eq!((softplus(-100.0), softplus(1e30)), (0.0, 1e30));
        assert!(softplus(f32::NAN).is_nan());
    }

    #[test]
    fn silu_and_sigmoid_have_their_limits() {
        assert_eq!(silu(0.0), 0.0);
        assert_eq!(sigmoid(0.0), 0.5);
        assert_eq!(sigmoid(100.0), 1.0);
        assert_eq!(silu(-100.0), -0.0);
    }
}
