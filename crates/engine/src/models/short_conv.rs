//! Layers with a gated short convolution: their settings and the names of their tensors.

use super::{Builder, Config, Name, keys};
use crate::blocks::short_conv::{ShortConv, ShortConvWeights};
use crate::error::Result;
use crate::format::Key;

const KERNEL: Key = Key { gguf: "shortconv.l_cache", hugging_face: &["conv_L_cache"] };
const BIAS: Key = Key { gguf: "", hugging_face: &["conv_bias"] };

const IN: Name = Name::new("shortconv.in_proj.weight", "conv.in_proj.weight");
const FILTERS: Name = Name::new("shortconv.conv.weight", "conv.conv.weight");
const OUT: Name = Name::new("shortconv.out_proj.weight", "conv.out_proj.weight");

/// The short convolution of a layer.
#[derive(Clone, Copy)]
pub struct Short {
    hidden: usize,
    kernel: usize,
}

impl Short {
    /// The convolution in the configuration.
    ///
    /// # Errors
    /// If a setting is missing or not supported.
    pub fn read(config: &Config<'_>) -> Result<Short> {
        if config.optional_bool(BIAS)? == Some(true) {
            return Err(config.unsupported(BIAS, "true"));
        }
        let (hidden, kernel) = (config.count(keys::HIDDEN)?, config.count(KERNEL)?);
        if kernel < 2 {
            return Err(config.unsupported(KERNEL, &kernel.to_string()));
        }
        // Leaves room to compute the bytes of several states.
        if kernel.checked_mul(hidden).is_none_or(|floats| floats >= usize::MAX >> 8) {
            return Err(config.error(KERNEL, "makes the recurrent states too large"));
        }
        Ok(Short { hidden, kernel })
    }

    /// The block, with buffers that all layers share.
    pub fn block(&self, b: &mut Builder<'_>) -> ShortConv {
        let &Short { hidden, kernel } = self;
        ShortConv {
            kernel,
            state: (kernel - 1) * hidden,
            before: b.buffer(hidden),
            after: b.buffer(hidden),
            x: b.buffer(hidden),
            convolved: b.buffer(hidden),
        }
    }

    /// The weights of layer `l`.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape.
    pub fn weights(&self, b: &mut Builder<'_>, l: usize) -> Result<ShortConvWeights> {
        let &Short { hidden, kernel } = self;
        Ok(ShortConvWeights {
            projections: b.matrix_in_parts(IN.of_layer(l), [hidden; 3], hidden)?,
            filters: b.filters(FILTERS.of_layer(l), hidden, kernel)?,
            out: b.matrix(OUT.of_layer(l), hidden, hidden)?,
        })
    }
}
