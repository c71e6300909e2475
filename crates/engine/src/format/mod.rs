//! Model files as directories of tensors: name, type, shape and place. No weight is read here.

pub mod gguf;
mod metadata;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use forebay_kernels::DType;

pub use metadata::{Metadata, NumberArray, NumberKind, StringArray, Value};

use crate::error::{Error, Result};

/// Which container a model came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One GGUF file, or several that a splitter made of one.
    Gguf,
}

impl Format {
    /// The name for people and for JSON.
    pub fn name(self) -> &'static str {
        match self {
            Format::Gguf => "gguf",
        }
    }
}

/// Index into [`ModelFile::files`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileIdx(pub usize);

/// One file of a model.
#[derive(Clone, Debug)]
pub struct FilePart {
    /// Where it is.
    pub path: PathBuf,
    /// How long it was when it was opened.
    pub len: u64,
}

/// One tensor: what it is and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name in the file.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// The logical shape, outermost dimension first: `[experts, rows, cols]`, `[rows, cols]` or `[len]`.
    pub shape: Vec<usize>,
    /// The file that holds it.
    pub file: FileIdx,
    /// Where its bytes start in that file.
    pub offset: u64,
    /// How many bytes it has.
    pub len: u64,
}

impl TensorInfo {
    /// The number of elements.
    pub fn elements(&self) -> u64 {
        // The parser has checked that the product fits.
        self.shape.iter().map(|&d| d as u64).product()
    }
}

/// A model on disk: its metadata and the directory of its tensors.
#[derive(Debug)]
pub struct ModelFile {
    /// The container.
    pub format: Format,
    /// The files, in order.
    pub files: Vec<FilePart>,
    /// What the file says about itself.
    pub metadata: Metadata,
    /// The tensors, in file order.
    pub tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

impl ModelFile {
    /// Opens a model by the path of its file, or of any part of a split one, and reads its directory.
    pub fn open(path: &Path) -> Result<ModelFile> {
        gguf::open(path)
    }

    /// Joins what a parser found. Fails if two tensors have the same name.
    fn new(
        format: Format,
        files: Vec<FilePart>,
        metadata: Metadata,
        tensors: Vec<TensorInfo>,
    ) -> Result<ModelFile> {
        let mut by_name = HashMap::new();
        for (i, tensor) in tensors.iter().enumerate() {
            if let Some(first) = by_name.insert(tensor.name.clone(), i) {
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
        Ok(ModelFile { format, files, metadata, tensors, by_name })
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// The path that names the model in messages: its first file.
    pub fn path(&self) -> &Path {
        &self.files[0].path
    }

    /// All bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.len).sum()
    }
}
