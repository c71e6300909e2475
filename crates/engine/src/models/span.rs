//! Which of a model's layers are here: all of them, or those of one stage.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A range of a model's layers.
///
/// # Examples
/// ```
/// use forebay_engine::{Options, Stage};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// let stage = Stage::open(model, &Options::new().threads(1).layers(2..4))?;
/// assert_eq!(stage.span().to_string(), "layers 2..4 of 8");
/// assert!(!stage.span().has_first() && stage.span().contains(3));
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// The first layer.
    pub first: usize,
    /// The layer after the last one.
    pub end: usize,
    /// The number of layers of the model.
    pub all: usize,
}

impl Span {
    /// The layers that were asked for, or all.
    ///
    /// # Errors
    /// If the range is empty, or the model has no such layers.
    pub fn of(asked: Option<&Range<usize>>, all: usize) -> Result<Span> {
        let Some(&Range { start: first, end }) = asked else { return Ok(Span { first: 0, end: all, all }) };
        if first >= end {
            return Err(Error::Invalid(format!(
                "Options::layers is {first}..{end}, which has no layers; a stage needs at least one"
            )));
        }
        if end > all {
            return Err(Error::Invalid(format!(
                "Options::layers is {first}..{end}, but the model has only layers 0..{all}"
            )));
        }
        Ok(Span { first, end, all })
    }

    /// Whether these are all layers.
    pub fn is_whole(&self) -> bool {
        self.has_first() && self.has_last()
    }

    /// Whether the first layer is here, with the embeddings before it.
    pub fn has_first(&self) -> bool {
        self.first == 0
    }

    /// Whether the last layer is here, with the head behind it.
    pub fn has_last(&self) -> bool {
        self.end == self.all
    }

    /// Whether this layer is here.
    pub fn contains(&self, layer: usize) -> bool {
        self.layers().contains(&layer)
    }

    /// The layers, unless these are all.
    pub fn part(&self) -> Option<Range<usize>> {
        (!self.is_whole()).then(|| self.layers())
    }

    /// The layers.
    pub fn layers(&self) -> Range<usize> {
        self.first..self.end
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layers {}..{} of {}", self.first, self.end, self.all)
    }
}
