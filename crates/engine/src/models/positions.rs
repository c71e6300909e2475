//! The rotations and temperatures of a family's layers. Layers with equal ones share their angles and factors.

use super::{Builder, Config, Name, keys};
use crate::backend::{Buf, Rope, RopePairs, Vector};
use crate::blocks::gqa::Rotation;
use crate::blocks::positions::{Positions, Temperature};
use crate::blocks::rope::RopeScaling;
use crate::error::Result;
use crate::format::Format;

/// Divisors of the rotation frequencies, in some GGUF files.
pub const ROPE_DIVISORS: Name = Name::new("rope_freqs.weight", "");

/// LongRoPE's divisors for contexts up to the original one and beyond it, in GGUF files.
const SHORT_AND_LONG: [Name; 2] =
    [Name::new("rope_factors_short.weight", ""), Name::new("rope_factors_long.weight", "")];

/// A rotation of the first channels of heads.
#[derive(Clone, Copy, PartialEq)]
pub struct Rotating {
    /// The number of channels.
    pub channels: usize,
    /// The base of the frequencies.
    pub base: f32,
    /// Their scaling for longer contexts.
    pub scaling: RopeScaling,
    /// The factor of cosine and sine.
    pub scale: f32,
    /// Which channels rotate together.
    pub pairs: RopePairs,
    /// Whether a file's divisors of frequencies are for this rotation.
    pub divided: bool,
}

impl Rotating {
    /// The rotation in the configuration, of heads with `key_dim` channels.
    ///
    /// # Errors
    /// If a setting is missing, inconsistent or not supported.
    pub fn read(config: &Config<'_>, key_dim: usize) -> Result<Rotating> {
        let base = config.optional_float(keys::ROPE_BASE)?.unwrap_or(10_000.0);
        let scaling = config.rope_scaling()?;
        let channels = match scaling {
            // The share is that of the frequencies.
            RopeScaling::Proportional { .. } => key_dim,
            _ => rotated_channels(config, key_dim)?,
        };
        Ok(Rotating::new(channels, base, scaling))
    }

    /// A rotation of this many channels, half of them with the other half.
    pub fn new(channels: usize, base: f32, scaling: RopeScaling) -> Rotating {
        let pairs = RopePairs::HalfSplit;
        Rotating { channels, base, scaling, scale: scaling.scale(), pairs, divided: true }
    }

    /// The divisors of the frequencies in a GGUF file, if it has any: `pairs`, of which this rotation may use the first.
    fn divisors(&self, b: &mut Builder<'_>, pairs: usize) -> Result<Option<Vector>> {
        let count = self.channels / 2;
        match self.scaling {
            RopeScaling::Listed { .. } => {
                let [short, long] = SHORT_AND_LONG;
                b.vector(long, count)?;
                b.vector(short, count).map(Some)
            }
            _ if self.divided && b.has(ROPE_DIVISORS) => {
                b.vector_start(ROPE_DIVISORS, pairs, count).map(Some)
            }
            _ => Ok(None),
        }
    }
}

/// Whether a GGUF file has LongRoPE's divisors.
pub fn has_short_and_long(b: &Builder<'_>) -> bool {
    SHORT_AND_LONG.into_iter().all(|name| b.has(name))
}

/// Divides frequencies by the divisors in a folder's settings.
fn divide(b: &Builder<'_>, frequencies: &mut [f32]) -> Result<()> {
    let divisors = b.numbers(keys::ROPE_SHORT_DIVISORS, frequencies.len())?;
    frequencies.iter_mut().zip(divisors).for_each(|(f, divisor)| *f = (f64::from(*f) / divisor) as f32);
    Ok(())
}

/// The number of channels of a head that rotate.
fn rotated_channels(config: &Config<'_>, key_dim: usize) -> Result<usize> {
    let channels = config.optional_count(keys::ROPE_DIM)?;
    let share = config.optional_float(keys::ROPE_SHARE)?;
    let (key, rotated) = match (channels, share) {
        (Some(channels), _) => (keys::ROPE_DIM, channels),
        (None, Some(share)) => (keys::ROPE_SHARE, (key_dim as f32 * share) as usize),
        (None, None) => (keys::ROPE_DIM, key_dim),
    };
    if rotated == 0 || rotated > key_dim || !rotated.is_multiple_of(2) {
        let problem = format!(
            "sets {rotated} rotated channels of {key_dim}; the number must be even and at most {key_dim}"
        );
        return Err(config.error(key, &problem));
    }
    Ok(rotated)
}

/// The different rotations and temperatures of a model's layers, each with its buffer.
#[derive(Default)]
pub struct Places {
    rotations: Vec<(Rotating, Buf)>,
    temperatures: Vec<(Temperature, Buf)>,
}

impl Places {
    /// The buffer of a rotation's angles.
    pub fn rotation(&mut self, b: &mut Builder<'_>, rotating: &Rotating) -> Rotation {
        // Pairs do not change the angles.
        let alike = |known: &Rotating| Rotating { pairs: rotating.pairs, ..*known } == *rotating;
        let angles = match self.rotations.iter().find(|(known, _)| alike(known)) {
            Some((_, angles)) => *angles,
            None => {
                let angles = b.buffer(rotating.channels);
                self.rotations.push((*rotating, angles));
                angles
            }
        };
        Rotation { angles, pairs: rotating.pairs }
    }

    /// The buffer of a temperature's factors.
    pub fn temperature(&mut self, b: &mut Builder<'_>, temperature: Temperature) -> Buf {
        match self.temperatures.iter().find(|(known, _)| *known == temperature) {
            Some((_, factors)) => *factors,
            None => {
                let factors = b.buffer(1);
                self.temperatures.push((temperature, factors));
                factors
            }
        }
    }

    /// What a batch computes from its positions. Call it when the tensors have confirmed the sizes.
    ///
    /// # Errors
    /// If the divisors of frequencies do not fit.
    pub fn finish(self, b: &mut Builder<'_>) -> Result<Positions> {
        // Files have as many divisors as the widest rotation has pairs.
        let pairs = self.rotations.iter().map(|(rotating, _)| rotating.channels / 2).max().unwrap_or(0);
        let mut ropes = Vec::new();
        for (rotating, angles) in self.rotations {
            let Rotating { channels, base, scaling, scale, .. } = rotating;
            let mut frequencies = scaling.frequencies(base, channels);
            let mut divisors = None;
            if matches!(scaling, RopeScaling::Listed { .. }) && b.format() != Format::Gguf {
                divide(b, &mut frequencies)?;
            } else {
                divisors = rotating.divisors(b, pairs)?;
            }
            ropes.push((Rope { frequencies, divisors, scale }, angles));
        }
        Ok(Positions { ropes, temperatures: self.temperatures })
    }
}
