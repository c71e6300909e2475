//! The settings of positions: the length of the context, the scaling of the rotation, the temperature of queries.

use super::config::LARGEST;
use super::{Config, LayerKind, keys};
use crate::blocks::positions::Temperature;
use crate::blocks::rope::{Llama3, RopeScaling, Yarn};
use crate::error::Result;
use crate::format::Format;

impl Config<'_> {
    /// The longest context of the model. With YaRN scaling this is the extended length, even if the file has the
    /// original one. With LongRoPE it is the original one, because longer texts have other frequencies from their first
    /// token on.
    ///
    /// # Errors
    /// If it is missing or invalid.
    pub fn context(&self) -> Result<usize> {
        let context = self.count(keys::CONTEXT)?;
        // Layers with a window do not limit the context.
        let full = self.of_layer(0, LayerKind::Full);
        let yarn = match full.rope_scaling()? {
            RopeScaling::Yarn(yarn) => yarn,
            RopeScaling::Listed { original, .. } => return Ok(context.min(original)),
            _ => return Ok(context),
        };
        let stretched = yarn.original * yarn.factor;
        if stretched > LARGEST as f64 {
            return Err(full.error(keys::ROPE_FACTOR, "makes the context absurdly long"));
        }
        Ok(context.max(stretched as usize))
    }

    /// The temperature of queries, which GGUF files and folders describe by a strength and the length of the context
    /// that the model was first trained on.
    ///
    /// # Errors
    /// If the strength is present without a length, or a number is invalid.
    pub fn temperature(&self) -> Result<Option<Temperature>> {
        let length = self.number(keys::TEMPERATURE_LENGTH)?;
        let Some(strength) = self.nonzero_float(keys::TEMPERATURE)? else { return Ok(None) };
        let length = match Some(length).filter(|&length| length > 0) {
            Some(length) => length,
            None => self.count(keys::ROPE_ORIGINAL)?,
        };
        Ok(Some(Temperature { strength: strength as f32, length, ahead: 0 }))
    }

    /// The scaling of the rotation. GGUF files of Llama 3 have it in a tensor instead.
    ///
    /// # Errors
    /// If the kind of scaling is not supported, or a number for it is missing or invalid.
    pub fn rope_scaling(&self) -> Result<RopeScaling> {
        match self.optional_text(keys::ROPE_SCALING)? {
            Some("none" | "default") => Ok(RopeScaling::Plain),
            Some("linear") => Ok(RopeScaling::Linear(self.float(keys::ROPE_FACTOR)?.into())),
            Some("llama3") => self.llama3().map(RopeScaling::Llama3),
            Some("yarn") => self.yarn().map(RopeScaling::Yarn),
            // Hunyuan calls its scaling dynamic, but the frequencies are fixed.
            Some("dynamic") if let Some(alpha) = self.optional_float(keys::ROPE_ALPHA)? => {
                Ok(RopeScaling::RaisedBase(alpha.into()))
            }
            Some("longrope" | "su") => self.long_rope(),
            Some("proportional") => {
                let share = self.optional_float(keys::ROPE_SHARE)?.unwrap_or(1.0).into();
                let factor = self.optional_float(keys::ROPE_FACTOR)?.unwrap_or(1.0).into();
                Ok(RopeScaling::Proportional { share, factor })
            }
            Some(other) => Err(self.unsupported(keys::ROPE_SCALING, other)),
            None => self.untyped_rope_scaling(),
        }
    }

    /// In GGUF files, a factor without a kind means linear scaling. Older files have it under another name.
    fn untyped_rope_scaling(&self) -> Result<RopeScaling> {
        for key in [keys::ROPE_FACTOR, keys::ROPE_LINEAR] {
            if let Some(factor) = self.optional_float(key)?.filter(|&f| f != 1.0) {
                return match self.format() {
                    Format::Gguf => Ok(RopeScaling::Linear(factor.into())),
                    Format::HuggingFace | Format::Mlx => Err(self.unsupported(key, &factor.to_string())),
                };
            }
        }
        Ok(RopeScaling::Plain)
    }

    fn long_rope(&self) -> Result<RopeScaling> {
        let (context, original) = (self.count(keys::CONTEXT)?, self.count(keys::ROPE_ORIGINAL)?);
        let scale =
            match self.optional_float(keys::ROPE_SHORT_SCALE)?.or(self.optional_float(keys::ROPE_ATTENTION)?)
            {
                Some(scale) => scale.into(),
                None => {
                    let factor = self
                        .optional_float(keys::ROPE_FACTOR)?
                        .map_or(context as f64 / original as f64, f64::from);
                    if factor > 1.0 { (1.0 + factor.ln() / (original as f64).ln()).sqrt() } else { 1.0 }
                }
            };
        Ok(RopeScaling::Listed { scale, original })
    }

    fn llama3(&self) -> Result<Llama3> {
        let (low, high) = (self.float(keys::ROPE_LOW)?.into(), self.float(keys::ROPE_HIGH)?.into());
        if low >= high {
            return Err(self.error(keys::ROPE_HIGH, "is not above the low one"));
        }
        let original = self.count(keys::ROPE_ORIGINAL)? as f64;
        Ok(Llama3 { factor: self.float(keys::ROPE_FACTOR)?.into(), original, low, high })
    }

    fn yarn(&self) -> Result<Yarn> {
        self.refuse_factor(keys::ROPE_ATTENTION_MULTIPLIER)?;
        self.refuse_factor(keys::ROPE_EXTRAPOLATION)?;
        let context = self.count(keys::CONTEXT)?;
        let original = self.optional_count(keys::ROPE_ORIGINAL)?;
        let factor = match (self.optional_float(keys::ROPE_FACTOR)?, original) {
            (Some(factor), _) => f64::from(factor),
            (None, Some(original)) => context as f64 / original as f64,
            (None, None) => return Err(self.error(keys::ROPE_FACTOR, "is missing")),
        };
        let mscale = self.nonzero_float(keys::ROPE_MSCALE)?;
        let mscale_all_dim = self.nonzero_float(keys::ROPE_MSCALE_ALL_DIM)?.map(|m| match self.format() {
            Format::Gguf => m / 0.1,
            Format::HuggingFace | Format::Mlx => m,
        });
        let magnitude = |mscale| Yarn::magnitude(factor, mscale);
        let scale = match (self.nonzero_float(keys::ROPE_ATTENTION)?, mscale, mscale_all_dim) {
            (Some(scale), ..) => scale,
            (None, Some(mscale), Some(all_dim)) => magnitude(mscale) / magnitude(all_dim),
            // GGUF files have only one of the two numbers and use it for both.
            (None, None, Some(_)) if self.format() == Format::Gguf => 1.0,
            _ => magnitude(1.0),
        };
        Ok(Yarn {
            factor,
            original: original.unwrap_or(context) as f64,
            beta_fast: self.nonzero_float(keys::ROPE_BETA_FAST)?.unwrap_or(32.0),
            beta_slow: self.nonzero_float(keys::ROPE_BETA_SLOW)?.unwrap_or(1.0),
            round: self.optional_bool(keys::ROPE_TRUNCATE)?.unwrap_or(true),
            scale,
            mscale_all_dim,
        })
    }
}
