//! What depends only on the positions of a batch, computed once for all layers: angles of rotations, and factors of
//! queries.

use crate::backend::{Backend, Buf, Rope};
use crate::error::Result;

/// The rotations and temperatures of a model, each with the buffer for its results.
#[derive(Debug, Default)]
pub struct Positions {
    /// `[rows, rotated channels]`
    pub ropes: Vec<(Rope, Buf)>,
    /// `[rows, 1]`
    pub temperatures: Vec<(Temperature, Buf)>,
}

/// Factors that sharpen the attention of queries at late positions: `1 + strength · ln(1 + ⌊(p + ahead) / length⌋)` at
/// position `p`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Temperature {
    /// How much later positions are sharpened.
    pub strength: f32,
    /// How many positions share a factor.
    pub length: usize,
    /// Added to the position.
    pub ahead: usize,
}

impl Temperature {
    /// The factor of a position.
    pub fn factor(&self, position: u32) -> f32 {
        let steps = (position as usize + self.ahead) / self.length;
        (1.0 + f64::from(self.strength) * (steps as f64).ln_1p()) as f32
    }
}

impl Positions {
    /// Computes everything for the positions of a batch.
    ///
    /// # Errors
    /// If the backend fails.
    pub fn begin(&self, b: &mut dyn Backend, positions: &[u32]) -> Result<()> {
        for (rope, angles) in &self.ropes {
            b.rope_angles(rope, positions, *angles)?;
        }
        for (temperature, factors) in &self.temperatures {
            let values: Vec<f32> = positions.iter().map(|&position| temperature.factor(position)).collect();
            b.write(*factors, &values)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_grow_with_whole_lengths() {
        let temperature = Temperature { strength: 0.1, length: 100, ahead: 1 };
        assert_eq!([0, 98].map(|position| temperature.factor(position)), [1.0; 2]);
        let later = [99, 198, 199].map(|position| temperature.factor(position));
        for (factor, steps) in later.into_iter().zip([1.0f64, 1.0, 2.0]) {
            assert!((f64::from(factor) - 1.0 - 0.1 * (1.0 + steps).ln()).abs() < 1e-7);
        }
    }
}
