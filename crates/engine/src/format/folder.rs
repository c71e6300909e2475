//! Opens models in folders, as Hugging Face and MLX publish them: settings in `config.json`, weights in safetensors
//! files.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde_json::{Map, Value as Json};

use super::{FileIdx, FilePart, Format, Metadata, ModelFile, Quoted, json, safetensors};
use crate::error::{Error, Result};

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The largest index that is read. An index of a hundred thousand tensors has ten megabytes.
const MAX_INDEX_BYTES: u64 = 128 << 20;

/// The most files with a model's weights.
const MAX_SHARDS: usize = 4096;

/// The folder of the model that `path` belongs to: the folder itself, one of its weight files, its index or its
/// settings. `None` if `path` is something else.
pub(super) fn folder_of(path: &Path) -> Option<PathBuf> {
    if path.is_dir() {
        return Some(path.to_owned());
    }
    let name = path.file_name()?.to_str()?;
    let belongs =
        name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json") || name == CONFIG;
    let parent = path.parent()?;
    belongs.then(|| if parent.as_os_str().is_empty() { PathBuf::from(".") } else { parent.to_owned() })
}

/// Opens the model in `folder`. `named` is the folder, or the file in it that the caller named.
pub(super) fn open(folder: &Path, named: &Path) -> Result<ModelFile> {
    fs::metadata(named).map_err(|e| Error::io(named, "cannot open", e))?;
    let metadata = settings(folder)?;
    refuse_other_schemes(folder, &metadata)?;
    let mut files = Vec::new();
    let mut tensors = Vec::new();
    let mut mlx = metadata.get("quantization.group_size").is_some();
    let shards = shards(folder)?;
    let is_weights = named.extension().is_some_and(|extension| extension == "safetensors");
    if is_weights
        && !named.is_dir()
        && !shards.iter().any(|shard| named.file_name().is_some_and(|n| n == &**shard))
    {
        return Err(Error::format(named, "this file is not part of the model in its folder"));
    }
    for name in shards {
        let path = folder.join(&name);
        let cannot_open =
            |e| Error::io(&path, "cannot open a part of the model (download all of them into its folder)", e);
        // Opening a pipe would wait for a writer, so check the kind of file first.
        if !fs::metadata(&path).map_err(cannot_open)?.is_file() {
            return Err(cannot_open(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
        }
        let mut file = File::open(&path).map_err(cannot_open)?;
        let len = file.metadata().map_err(cannot_open)?.len();
        let header = safetensors::parse(&path, &mut file, len, FileIdx(files.len()))?;
        mlx |= header.format.as_deref() == Some("mlx");
        tensors.extend(header.tensors);
        if tensors.len() > safetensors::MAX_TENSORS {
            let message = format!("the model has more than {} tensors", safetensors::MAX_TENSORS);
            return Err(Error::format(folder, message));
        }
        files.push(FilePart { path, len });
    }
    let format = if mlx { Format::Mlx } else { Format::HuggingFace };
    let mut model = ModelFile::new(format, files, metadata, tensors)?;
    model.folder = Some(folder.to_owned());
    Ok(model)
}

/// The settings in the folder's JSON files; those for generation have the prefix `generation_config`.
fn settings(folder: &Path) -> Result<Metadata> {
    let path = folder.join(CONFIG);
    if !path.exists() {
        return Err(Error::format(
            folder,
            format!("not a model's folder: it has no {CONFIG}{}", hint(folder)),
        ));
    }
    let mut metadata = config_metadata(&path, json::read_object(&path)?)?;
    let path = folder.join(GENERATION);
    if path.exists() {
        json::add_object(&mut metadata, &path, "generation_config.", json::read_object(&path)?)?;
    }
    Ok(metadata)
}

/// The metadata of a model's `config.json`.
///
/// Models with vision or audio have the text model's settings in a nested object. These are moved to the top level
/// and precede others of the same name.
///
/// # Errors
/// If a key is ambiguous.
pub fn config_metadata(path: &Path, mut config: Map<String, Json>) -> Result<Metadata> {
    if let Some(Json::Object(text)) = config.remove("text_config") {
        for (key, value) in text {
            if !value.is_null() {
                config.insert(key, value);
            }
        }
    }
    let mut metadata = Metadata::default();
    json::add_object(&mut metadata, path, "", config)?;
    Ok(metadata)
}

/// A hint for common mistakes: what the folder may be instead.
fn hint(folder: &Path) -> String {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let with = |suffix: &str| names.iter().find(|name| name.ends_with(suffix));
    if let Some(name) = with(".gguf") {
        format!("; it has GGUF files: name one of them, such as {}", folder.join(name).display())
    } else if let Some(name) = names.iter().find(|name| folder.join(name).join(CONFIG).exists()) {
        format!("; a folder in it has one: {}", folder.join(name).display())
    } else if names.iter().any(|name| name == "snapshots") {
        "; it is part of a cache of downloads: name a folder in its snapshots".into()
    } else if with(".safetensors").is_some() {
        format!("; download {CONFIG} and tokenizer.json from where its weights come from")
    } else if with(".bin").or(with(".pt")).or(with(".pth")).is_some() {
        "; PyTorch's files are not supported: download the model's safetensors files, or a GGUF file".into()
    } else if names.is_empty() {
        "; it is empty".into()
    } else {
        "; name a GGUF file, or a folder with config.json and safetensors files".into()
    }
}

/// Refuses unsupported quantisation schemes by name.
fn refuse_other_schemes(folder: &Path, metadata: &Metadata) -> Result<()> {
    let method = match metadata.get("quantization_config.quant_method") {
        None => return Ok(()),
        Some(value) => value.as_str().unwrap_or("a value that is not a string"),
    };
    let refuse = |what: &str| {
        Err(Error::Unsupported(format!(
            "{}: quantised with {what}, which is not supported; supported are unquantised weights, FP8 in blocks, \
             MXFP4, MLX's affine quantisation and GGUF files",
            folder.join(CONFIG).display()
        )))
    };
    match method {
        "mxfp4" => Ok(()),
        "fp8" if metadata.get("quantization_config.weight_block_size").is_some() => Ok(()),
        "fp8" => refuse("fp8 without weight_block_size"),
        other => refuse(&Quoted(other).to_string()),
    }
}

/// The names of the files with the weights.
fn shards(folder: &Path) -> Result<Vec<String>> {
    let path = folder.join(INDEX);
    if path.exists() {
        let file = File::open(&path).map_err(|e| Error::io(&path, "cannot open", e))?;
        let len = file.metadata().map_err(|e| Error::io(&path, "cannot open", e))?.len();
        if len > MAX_INDEX_BYTES {
            return Err(Error::format(&path, format!("it has {len} bytes, more than {MAX_INDEX_BYTES}")));
        }
        let text = fs::read(&path).map_err(|e| Error::io(&path, "cannot read", e))?;
        return parse_index(&path, &text);
    }
    if folder.join(SINGLE).exists() {
        return Ok(vec![SINGLE.into()]);
    }
    let entries = fs::read_dir(folder).map_err(|e| Error::io(folder, "cannot list", e))?;
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut names = names.filter(|name| name.ends_with(".safetensors"));
    match (names.next(), names.next()) {
        (None, _) => Err(Error::format(folder, format!("it has no safetensors files{}", hint(folder)))),
        (Some(only), None) => Ok(vec![only]),
        (Some(_), Some(_)) => Err(Error::format(
            folder,
            format!("it has several safetensors files, but no {INDEX}; download that, too"),
        )),
    }
}

/// The files that an index lists, in order; `path` is only used in messages.
///
/// # Errors
/// If it is not an index, or lists a file outside the folder.
pub fn parse_index(path: &Path, text: &[u8]) -> Result<Vec<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: Shards,
    }
    let index: Index = serde_json::from_slice(text).map_err(|e| {
        Error::format(path, format!("it is not an index of tensors: {}", Quoted(&e.to_string())))
    })?;
    let names: Vec<String> = index.weight_map.0.into_iter().collect();
    if names.is_empty() {
        return Err(Error::format(path, "it names no files"));
    }
    // A name with a path in it could lead outside the folder.
    let outside = |name: &&String| Path::new(name).file_name().is_none_or(|file| file != name.as_str());
    if let Some(name) = names.iter().find(outside) {
        return Err(Error::format(
            path,
            format!("it names {}, which is not a file of its folder", Quoted(name)),
        ));
    }
    Ok(names)
}

/// The distinct files of an index. The tensors' names are not kept, because the files have them too.
struct Shards(BTreeSet<String>);

impl<'de> Deserialize<'de> for Shards {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Shards, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Shards;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Shards, A::Error> {
                let mut names = BTreeSet::new();
                while let Some((_, file)) = map.next_entry::<serde::de::IgnoredAny, String>()? {
                    names.insert(file);
                    if names.len() > MAX_SHARDS {
                        return Err(A::Error::custom(format_args!("more than {MAX_SHARDS} files")));
                    }
                }
                Ok(Shards(names))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}
