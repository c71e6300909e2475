//! Opens model files and lists their tensors: name, type, shape and place. Reads no weights.

pub mod folder;
pub(crate) mod foreign;
pub mod gguf;
mod json;
mod metadata;
pub mod safetensors;
mod weights;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};

pub use forebay_kernels::DType;
pub use json::parse_object;
pub use metadata::{Metadata, NumberArray, NumberKind, StringArray, Value};
pub use weights::StoredWeight;

use crate::error::{Error, Result};

/// The file format of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One GGUF file, or several parts of a split one.
    Gguf,
    /// A folder with `config.json` and safetensors files.
    HuggingFace,
    /// A folder written by MLX: with the same names, but weights may be quantised in MLX's way.
    Mlx,
}

impl Format {
    /// The name in messages and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Format::Gguf => "gguf",
            Format::HuggingFace => "safetensors",
            Format::Mlx => "mlx",
        }
    }
}

/// Index into [`ModelFile::files`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileIdx(pub usize);

/// One file of a model.
#[derive(Clone, Debug)]
pub struct FilePart {
    /// Its path.
    pub path: PathBuf,
    /// Its length when it was opened.
    pub len: u64,
}

/// One tensor: its type, its shape, and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name in the file.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// The logical shape, outermost dimension first: `[experts, rows, cols]`, `[rows, cols]` or `[len]`.
    pub shape: Vec<usize>,
    /// The file with its bytes.
    pub file: FileIdx,
    /// The offset of its bytes in that file.
    pub offset: u64,
    /// The number of its bytes.
    pub len: u64,
}

impl TensorInfo {
    /// The number of elements.
    pub fn elements(&self) -> u64 {
        // The parser has checked that the product fits.
        self.shape.iter().map(|&d| d as u64).product()
    }
}

/// A tensor of an unknown type, whose length is therefore unknown too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownTensor {
    /// The name in the file.
    pub name: String,
    /// The number of its type in the file.
    pub type_id: u32,
    /// The logical shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// The file with its bytes.
    pub file: FileIdx,
    /// The offset of its bytes in that file.
    pub offset: u64,
}

impl UnknownTensor {
    /// The number of elements.
    pub fn elements(&self) -> u64 {
        // The parser has checked that the product fits.
        self.shape.iter().map(|&d| d as u64).product()
    }
}

/// A model on disk: its metadata and its tensors.
///
/// # Examples
/// ```
/// use forebay_engine::ModelFile;
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// let file = ModelFile::open(model)?;
/// assert_eq!(file.architecture(), Some("qwen3moe"));
/// assert_eq!(file.metadata.str("general.name"), Some("Tales qwen3moe"));
/// assert_eq!(file.tensor("token_embd.weight").map(|tensor| &*tensor.shape), Some(&[4096, 256][..]));
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Debug)]
pub struct ModelFile {
    /// The file format.
    pub format: Format,
    /// The files, in order.
    pub files: Vec<FilePart>,
    /// The settings in the file.
    pub metadata: Metadata,
    /// The tensors, in file order.
    pub tensors: Vec<TensorInfo>,
    /// Tensors of unknown types, in file order. Only [`ModelFile::survey`] returns models that have any.
    pub unknown: Vec<UnknownTensor>,
    /// The index of each tensor, by the name that [`tensor`](Self::tensor) takes.
    by_name: HashMap<String, usize>,
    /// The folder, if the model is one.
    folder: Option<PathBuf>,
}

/// The names of a setting: in GGUF files, where it follows the architecture's name, and in `config.json`, where
/// several names may have the same meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Empty if GGUF files do not have it.
    pub gguf: &'static str,
    /// The first one present is used.
    pub hugging_face: &'static [&'static str],
}

impl ModelFile {
    /// Opens a model and reads its directory. `path` is a GGUF file, any part of a split one, a folder with
    /// safetensors files, or one of the files in such a folder.
    ///
    /// # Errors
    /// If it cannot be read, is damaged, or has a tensor of an unknown type.
    pub fn open(path: &Path) -> Result<ModelFile> {
        let model = ModelFile::survey(path)?;
        match model.unknown.first() {
            None => Ok(model),
            Some(tensor) => Err(gguf::unknown_type(&model, tensor)),
        }
    }

    /// Like [`open`](Self::open), but tensors may have unknown types, for listing what a file contains.
    ///
    /// # Errors
    /// If it cannot be read or is damaged.
    pub fn survey(path: &Path) -> Result<ModelFile> {
        match folder::folder_of(path) {
            Some(folder) => folder::open(&folder, path),
            None => gguf::open(path),
        }
    }

    /// Builds the model from a parser's results. Fails if two tensors have the same name.
    fn new(
        format: Format,
        files: Vec<FilePart>,
        metadata: Metadata,
        tensors: Vec<TensorInfo>,
    ) -> Result<ModelFile> {
        let mut by_name = HashMap::new();
        for (i, tensor) in tensors.iter().enumerate() {
            if let Some(first) = by_name.insert(known_name(format, &tensor.name).into_owned(), i) {
                let name = &tensor.name;
                let [first, second] = [&tensors[first], tensor].map(|t| files[t.file.0].path.as_path());
                let message = if first == second {
                    format!("the tensor name {name:?} appears a second time")
                } else {
                    format!("the tensor {name:?} is also in {}", first.display())
                };
                return Err(Error::format(second, message));
            }
        }
        Ok(ModelFile { format, files, metadata, tensors, unknown: Vec::new(), by_name, folder: None })
    }

    /// A GGUF file with settings and without tensors, which need not exist.
    pub(crate) fn without_tensors(path: &Path, metadata: Metadata) -> ModelFile {
        ModelFile {
            format: Format::Gguf,
            files: vec![FilePart { path: path.to_owned(), len: 0 }],
            metadata,
            tensors: Vec::new(),
            unknown: Vec::new(),
            by_name: HashMap::new(),
            folder: None,
        }
    }

    /// Adds a tensor of which only the shape matters.
    pub(crate) fn imagine(&mut self, name: &str, shape: &[usize]) -> Result<()> {
        let len = shape.iter().try_fold(4u64, |product, &d| product.checked_mul(d as u64));
        let len = len.ok_or_else(|| {
            Error::format(self.path(), format!("tensor {name} of shape {shape:?} would be too large"))
        })?;
        self.by_name.insert(name.to_owned(), self.tensors.len());
        self.tensors.push(TensorInfo {
            name: name.to_owned(),
            dtype: DType::F32,
            shape: shape.to_vec(),
            file: FileIdx(0),
            offset: 0,
            len,
        });
        Ok(())
    }

    /// The architecture in the settings: a family's name in GGUF files, a class or type in folders.
    pub fn architecture(&self) -> Option<&str> {
        match self.format {
            Format::Gguf => self.metadata.str("general.architecture"),
            Format::HuggingFace | Format::Mlx => {
                let classes = self.metadata.get("architectures").and_then(Value::as_strings);
                classes.and_then(|c| c.get(0)).or_else(|| self.metadata.str("model_type"))
            }
        }
    }

    /// The value of a setting, and the setting's name in this kind of file.
    pub fn setting(&self, key: &Key) -> Option<(String, &Value)> {
        match self.format {
            Format::Gguf if key.gguf.is_empty() => None,
            Format::Gguf => {
                let name = self.setting_name(key);
                let value = self.metadata.get(&name)?;
                Some((name, value))
            }
            Format::HuggingFace | Format::Mlx => {
                key.hugging_face.iter().find_map(|&name| Some((name.to_owned(), self.metadata.get(name)?)))
            }
        }
    }

    /// The name of a setting in this kind of file.
    pub fn setting_name(&self, key: &Key) -> String {
        match self.format {
            Format::Gguf => format!("{}.{}", self.architecture().unwrap_or_default(), key.gguf),
            Format::HuggingFace | Format::Mlx => {
                key.hugging_face.first().copied().unwrap_or_default().to_owned()
            }
        }
    }

    /// The file with the settings.
    pub fn settings_path(&self) -> PathBuf {
        match &self.folder {
            Some(folder) => folder.join("config.json"),
            None => self.files[0].path.clone(),
        }
    }

    /// The tensor with this name. If the text model is part of a larger one, names omit the larger model's prefix.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(&*known_name(self.format, name)).map(|&i| &self.tensors[i])
    }

    /// The model's path for messages: its folder or its first file.
    pub fn path(&self) -> &Path {
        self.folder.as_deref().unwrap_or(&self.files[0].path)
    }

    /// The folder of a model in a folder.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The total size of all files in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.len).sum()
    }
}

/// The prefixes of the text model in models with vision or audio, and what takes their place.
const NESTED: [(&str, &str); 2] = [("model.language_model.", "model."), ("language_model.", "")];

/// Another prefix of a text model's tensors, and what takes its place.
const BACKBONE: (&str, &str) = ("backbone.", "model.");

/// The text model's prefix in a tensor's name, if it has one.
pub(crate) fn nesting(name: &str) -> Option<&'static str> {
    NESTED.into_iter().map(|(prefix, _)| prefix).find(|prefix| name.starts_with(prefix))
}

/// A tensor's name without the text model's prefix in models with vision or audio, and with the usual prefix.
pub(crate) fn known_name(format: Format, name: &str) -> Cow<'_, str> {
    if format == Format::Gguf {
        return Cow::Borrowed(name);
    }
    let prefixes = NESTED.iter().chain([&BACKBONE]);
    let known =
        prefixes.into_iter().find_map(|(prefix, instead)| Some((name.strip_prefix(prefix)?, instead)));
    match known {
        Some((rest, &"")) => Cow::Borrowed(rest),
        Some((rest, instead)) => Cow::Owned(format!("{instead}{rest}")),
        None => Cow::Borrowed(name),
    }
}

/// Displays a name from a file: quoted, without control characters, and at most one line.
pub(crate) struct Quoted<'a>(pub &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MAX_CHARS: usize = 80;
        f.write_char('"')?;
        for c in self.0.chars().take(MAX_CHARS) {
            write!(f, "{}", c.escape_debug())?;
        }
        f.write_str(if self.0.chars().nth(MAX_CHARS).is_some() { "…\"" } else { "\"" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_name_cannot_write_to_the_terminal() {
        assert_eq!(Quoted("a\x1b[2J\n").to_string(), r#""a\u{1b}[2J\n""#);
        assert_eq!(Quoted(&"x".repeat(81)).to_string(), format!("\"{}…\"", "x".repeat(80)));
    }

    #[test]
    fn the_text_model_has_the_same_names_alone_and_in_a_larger_model() {
        for name in ["model.layers.0.x", "model.language_model.layers.0.x", "language_model.model.layers.0.x"]
        {
            assert_eq!(known_name(Format::Mlx, name), "model.layers.0.x");
        }
        assert_eq!(known_name(Format::HuggingFace, "language_model.lm_head.weight"), "lm_head.weight");
    }
}
