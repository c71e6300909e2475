//! Writes models with random weights in the shape of real ones, to measure speed and memory. Their output is noise.

mod families;
mod layout;
mod noise;
mod settings;
mod types;
mod vocabulary;
mod writer;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

pub use families::{FAMILIES, Family};
pub use settings::Change;
pub use types::Types;
pub use vocabulary::FEWEST_TOKENS;

pub(crate) use noise::gaussian;

use self::layout::Layout;
use self::settings::Settings;
use crate::blocks::Cancel;
use crate::error::{Error, Result};
use crate::format::{DType, Metadata, Value, gguf};
use crate::models;

/// The most layers of a synthetic model. No real model has more, and the time to discover the tensors grows with the
/// square.
const MOST_LAYERS: u64 = 256;

/// A request for a synthetic model.
pub struct Order {
    /// The family.
    pub family: &'static Family,
    /// Sizes that differ from the family's.
    pub shape: Shape,
    /// Settings that differ from the family's, by name.
    pub changes: Vec<Change>,
    /// Types of matrices that differ from the family's.
    pub types: TypeChoice,
    /// The number of tokens of the vocabulary: at least [`FEWEST_TOKENS`].
    pub vocabulary: u64,
    /// How unevenly experts are chosen: the standard deviation of the logarithms of the lengths of a router's rows.
    pub skew: f32,
    /// The seed of the random numbers.
    pub seed: u64,
}

/// Sizes that replace a family's.
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct Shape {
    pub layers: Option<u64>,
    pub hidden: Option<u64>,
    pub inter: Option<u64>,
    pub experts: Option<u64>,
    pub top_k: Option<u64>,
    pub heads: Option<u64>,
    pub kv_heads: Option<u64>,
    pub head_dim: Option<u64>,
    pub ctx: Option<u64>,
}

/// Types that replace a family's.
#[derive(Clone, Copy, Default)]
pub struct TypeChoice {
    /// For all matrices.
    pub all: Option<DType>,
    /// For gate and up of routed experts.
    pub experts: Option<DType>,
    /// For the down projections of feed-forward blocks.
    pub down: Option<DType>,
    /// For the output matrix and the value projections.
    pub output: Option<DType>,
}

impl TypeChoice {
    fn resolve(&self, family: &Family) -> Types {
        let types = self.all.map_or(family.types, Types::all);
        Types {
            matrices: types.matrices,
            experts: self.experts.unwrap_or(types.experts),
            down: self.down.unwrap_or(types.down),
            output: self.output.unwrap_or(types.output),
        }
    }
}

/// A synthetic model that is ready to be written.
pub struct Synthesis {
    /// Types whose blocks do not divide all rows, each with the type used for those rows.
    pub fallbacks: BTreeSet<(&'static str, &'static str)>,
    /// Bytes of all routed experts.
    pub expert_bytes: u64,
    path: PathBuf,
    layout: Layout,
    seed: u64,
}

impl Synthesis {
    /// Prepares the file; `path` is only used in messages.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the shape is invalid.
    pub fn new(path: &Path, order: &Order) -> Result<Synthesis> {
        let Order { family, vocabulary, .. } = *order;
        if vocabulary < FEWEST_TOKENS || u32::try_from(vocabulary).is_err() {
            return Err(Error::Invalid(format!("the vocabulary must have at least {FEWEST_TOKENS} tokens")));
        }
        let settings = Settings::new(family, &order.shape, &order.changes)?;
        if settings.count("block_count").is_some_and(|layers| layers > MOST_LAYERS) {
            return Err(Error::Invalid(format!("a synthetic model has at most {MOST_LAYERS} layers")));
        }
        let optional = |name: &str| settings.has_optional(name);
        let needs = models::needs(path, settings.metadata(), vocabulary as usize, &optional)
            .map_err(|error| Error::Invalid(error.to_string()))?;
        let types = order.types.resolve(family);
        let mut fallbacks = BTreeSet::new();
        let typed = needs.into_iter().map(|need| {
            let dtype = types.of(&need, &mut fallbacks);
            (need, dtype)
        });
        let typed = typed.collect();
        let layout = Layout::new(&metadata(&settings, vocabulary), typed, order.skew)?;
        // Checks that the header can be loaded before anything is written.
        let file = gguf::parse(path, &mut layout.header.as_slice(), layout.bytes)?;
        let expert_bytes = models::describe(&file)?.expert_bytes();
        Ok(Synthesis { fallbacks, expert_bytes, path: path.to_owned(), layout, seed: order.seed })
    }

    /// The size of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.layout.bytes
    }

    /// The number of tensors.
    pub fn tensors(&self) -> usize {
        self.layout.tensors.len()
    }

    /// The number of weights.
    pub fn parameters(&self) -> u64 {
        self.layout.tensors.iter().map(|t| t.rows as u64 * t.cols as u64).sum()
    }

    /// Writes the file: the same bytes for the same order on every machine. `progress` receives the bytes written so
    /// far.
    ///
    /// # Errors
    /// If writing fails, or [`Error::Cancelled`] if a stop is requested.
    pub fn write(&self, out: &mut dyn Write, cancel: &Cancel, progress: &mut dyn FnMut(u64)) -> Result<()> {
        writer::write(&self.path, &self.layout, self.seed, out, cancel, progress)
    }
}

/// The metadata of the file.
fn metadata(settings: &Settings, vocabulary: u64) -> Metadata {
    let mut metadata = settings.metadata();
    let family = metadata.str("general.architecture").unwrap_or_default().to_owned();
    let count = |key: &str| settings.count(key).unwrap_or(0);
    let name = format!("synthetic-{family}-{}L-{}E", count("block_count"), count("expert_count"));
    let about = [
        ("general.name".to_owned(), Value::String(name)),
        ("general.quantization_version".to_owned(), Value::Unsigned(2)),
        (format!("{family}.vocab_size"), Value::Unsigned(vocabulary)),
    ];
    let tokenizer = vocabulary::metadata(vocabulary).into_iter().map(|(key, value)| (key.to_owned(), value));
    for (key, value) in about.into_iter().chain(tokenizer) {
        // Given settings take precedence.
        let _ = metadata.insert(key, value);
    }
    metadata
}
