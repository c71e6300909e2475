//! Reads a model's configuration from its file. Every value is checked.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::rc::Rc;

use super::{keys, unread};

use crate::error::{Error, Result};
use crate::format::{Format, Key, ModelFile, Quoted, StringArray, Value};

/// The largest dimension or count. No real model has a larger one; the limit keeps products of two in range.
pub(super) const LARGEST: u64 = 1 << 30;

/// The most layers. No real model has more; the limit keeps descriptions small for hostile files.
const MAX_LAYERS: usize = 1 << 12;

/// The settings of a model, from a GGUF file or a folder.
#[derive(Clone)]
pub struct Config<'a> {
    file: &'a ModelFile,
    /// The settings that were asked for, by their names in this kind of file.
    read: Rc<RefCell<BTreeSet<Cow<'static, str>>>>,
    /// The layer whose settings precede those of all layers.
    layer: Option<(usize, LayerKind)>,
    /// What a folder that omits a setting means.
    omitted: Cell<Omitted>,
}

/// Settings that folders of a family may omit, and their values.
pub type Omitted = &'static [(&'static str, Value)];

/// The kinds of layers that may have settings of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Those that see all positions.
    Full,
    /// Those with a window.
    Windowed,
}

impl<'a> Config<'a> {
    /// The configuration of a model.
    pub fn new(file: &'a ModelFile) -> Config<'a> {
        Config { file, read: Rc::default(), layer: None, omitted: Cell::default() }
    }

    /// The family's name in the file; empty if it has none.
    pub fn architecture(&self) -> &'a str {
        self.file.architecture().unwrap_or_default()
    }

    /// The settings that nothing has asked for: the whole name, the name without the architecture, and the value. Of GGUF
    /// files only those of the architecture.
    pub fn unread(&self) -> Vec<(&'a str, &'a str, &'a Value)> {
        let own_name = |name: &'a str| match self.format() {
            Format::Gguf => name.strip_prefix(self.architecture())?.strip_prefix('.'),
            Format::HuggingFace | Format::Mlx => Some(name),
        };
        let settings = self.file.metadata.iter();
        let named = settings.filter_map(|(name, value)| Some((name, own_name(name)?, value)));
        named.filter(|(_, key, _)| !self.has_read(key)).collect()
    }

    /// Whether a setting was asked for, by its name in this kind of file, without the architecture.
    pub fn has_read(&self, key: &str) -> bool {
        self.read.borrow().contains(key)
    }

    /// The value of any setting of a GGUF file, which does not count as read.
    pub fn unchecked(&self, key: &str) -> Option<&'a Value> {
        self.file.metadata.get(&format!("{}.{key}", self.architecture()))
    }

    /// The file with the settings, for messages.
    pub fn path(&self) -> PathBuf {
        self.file.settings_path()
    }

    /// The settings of a layer: its own, those of its kind, or else those of all layers. Of a list with a number for
    /// each layer, this is the layer's number, which is absent if it is null.
    pub fn of_layer(&self, layer: usize, kind: LayerKind) -> Config<'a> {
        Config { layer: Some((layer, kind)), ..self.clone() }
    }

    /// From now on, settings that a folder omits have these values.
    pub fn assume(&self, omitted: Omitted) {
        self.omitted.set(omitted);
    }

    /// The file format; some families' defaults depend on it.
    pub fn format(&self) -> Format {
        self.file.format
    }

    /// A required positive integer.
    ///
    /// # Errors
    /// If it is missing, not an integer, zero or too large.
    pub fn count(&self, key: Key) -> Result<usize> {
        self.optional_count(key)?.ok_or_else(|| self.missing(key))
    }

    /// An optional positive integer.
    ///
    /// # Errors
    /// If it is present but not an integer, zero or too large.
    pub fn optional_count(&self, key: Key) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(v @ 1..=LARGEST) => Ok(Some(v as usize)),
            Some(v) => Err(self.error(key, &format!("is {v}, not between 1 and {LARGEST}"))),
            None => Err(self.error(key, "is not a positive integer")),
        }
    }

    /// A required positive float.
    ///
    /// # Errors
    /// If it is missing, or not a positive finite number.
    pub fn float(&self, key: Key) -> Result<f32> {
        self.optional_float(key)?.ok_or_else(|| self.missing(key))
    }

    /// An optional positive float.
    ///
    /// # Errors
    /// If it is present but not a positive finite number.
    pub fn optional_float(&self, key: Key) -> Result<Option<f32>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().map(|v| v as f32) {
            Some(v) if v > 0.0 && v.is_finite() => Ok(Some(v)),
            _ => Err(self.error(key, "is not a positive number")),
        }
    }

    /// An optional boolean, which may be a number: all but zero are true.
    ///
    /// # Errors
    /// If it is present but neither.
    pub fn optional_bool(&self, key: Key) -> Result<Option<bool>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        truth(&value).map(Some).ok_or_else(|| self.error(key, "is not a boolean"))
    }

    /// Optional booleans, one for each layer.
    ///
    /// # Errors
    /// If there are not as many as layers, or some are not booleans.
    pub fn optional_bools(&self, key: Key, layers: usize) -> Result<Option<Vec<bool>>> {
        self.each_layer(key, layers, truth)
    }

    /// Whether a setting is a list of numbers.
    pub fn is_list(&self, key: Key) -> bool {
        self.setting(key).is_some_and(|(_, value)| value.as_numbers().is_some())
    }

    /// Whether a setting is a text.
    pub fn is_text(&self, key: Key) -> bool {
        self.setting(key).is_some_and(|(_, value)| value.as_str().is_some())
    }

    /// Optional numbers, one for each layer.
    ///
    /// # Errors
    /// If there are not as many as layers, or some are not finite numbers.
    pub fn optional_numbers(&self, key: Key, layers: usize) -> Result<Option<Vec<f64>>> {
        self.each_layer(key, layers, |value| value.as_f64().filter(|number| number.is_finite()))
    }

    /// Optional integers, one for each layer. They may be zero.
    ///
    /// # Errors
    /// If there are not as many as layers, or some are not integers or too large.
    pub fn optional_counts(&self, key: Key, layers: usize) -> Result<Option<Vec<usize>>> {
        let count =
            |value: &Value| value.as_u64().filter(|&count| count <= LARGEST).map(|count| count as usize);
        self.each_layer(key, layers, count)
    }

    /// An optional integer, which may be given for each layer if it is the same in all.
    ///
    /// # Errors
    /// As [`optional_counts`](Self::optional_counts), or if layers differ.
    pub fn optional_uniform(&self, key: Key, layers: usize) -> Result<Option<usize>> {
        let Some(counts) = self.optional_counts(key, layers)? else { return Ok(None) };
        match counts.iter().find(|&&count| count != counts[0]) {
            Some(_) => Err(self.error(key, "differs between layers, which is not supported")),
            None => Ok(counts.first().copied()),
        }
    }

    /// An optional integer, which may be negative.
    ///
    /// # Errors
    /// If it is present but not an integer.
    pub fn optional_signed(&self, key: Key) -> Result<Option<i64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let signed = value.as_f64().filter(|number| number.fract() == 0.0).map(|number| number as i64);
        signed.map(Some).ok_or_else(|| self.error(key, "is not an integer"))
    }

    /// A setting of each layer. A single value is that of all layers. Values beyond the last layer, such as those of
    /// layers for multi-token prediction, do not matter.
    fn each_layer<T: Clone>(
        &self,
        key: Key,
        layers: usize,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        let Some((_, value)) = self.setting(key) else { return Ok(None) };
        let Some(list) = value.as_numbers() else {
            let one = read(value).ok_or_else(|| self.error(key, "has an invalid value"))?;
            return Ok(Some(vec![one; layers]));
        };
        if list.len() < layers {
            return Err(self.error(key, &format!("has {} values for {layers} layers", list.len())));
        }
        let values = list.iter().take(layers).map(|value| read(&value)).collect::<Option<Vec<T>>>();
        values.map(Some).ok_or_else(|| self.error(key, "has an invalid value"))
    }

    /// An optional string.
    ///
    /// # Errors
    /// If it is present but not a string.
    pub fn optional_text(&self, key: Key) -> Result<Option<&'a str>> {
        let Some((_, value)) = self.setting(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.error(key, "is not a string"))
    }

    /// An optional list of strings.
    ///
    /// # Errors
    /// If it is present but not a list of strings.
    pub fn optional_texts(&self, key: Key) -> Result<Option<&'a StringArray>> {
        let Some((_, value)) = self.setting(key) else { return Ok(None) };
        value.as_strings().map(Some).ok_or_else(|| self.error(key, "is not a list of strings"))
    }

    /// The words or letters for the blocks of a model whose layers are single blocks, if the folder has them.
    ///
    /// # Errors
    /// If they are present but neither a list of strings nor a string.
    pub fn blocks(&self) -> Result<Option<Vec<String>>> {
        match self.setting(keys::BLOCKS).map(|(_, value)| (value.as_strings(), value.as_str())) {
            None => Ok(None),
            Some((Some(words), _)) => Ok(Some(words.iter().map(str::to_owned).collect())),
            Some((None, Some(letters))) => Ok(Some(letters.chars().map(String::from).collect())),
            Some((None, None)) => Err(self.error(keys::BLOCKS, "is neither a list of strings nor a string")),
        }
    }

    /// The number of layers of the text model. GGUF files also count layers for multi-token prediction, which are
    /// subtracted.
    ///
    /// # Errors
    /// If the number is missing, too large, or smaller than that of the layers for multi-token prediction.
    pub fn layers(&self) -> Result<usize> {
        let layers = match (self.optional_count(keys::LAYERS)?, self.blocks()?) {
            (Some(layers), _) => layers,
            (None, Some(blocks)) => blocks.len(),
            (None, None) => return Err(self.missing(keys::LAYERS)),
        };
        if layers > MAX_LAYERS {
            return Err(
                self.error(keys::LAYERS, &format!("is {layers}, more than the limit of {MAX_LAYERS}"))
            );
        }
        let extra = match self.format() {
            Format::Gguf => self.number(keys::EXTRA_LAYERS)?,
            Format::HuggingFace | Format::Mlx => 0,
        };
        match layers.checked_sub(extra) {
            Some(layers @ 1..) => Ok(layers),
            _ => Err(self.error(keys::EXTRA_LAYERS, "leaves no layers for the model")),
        }
    }

    /// An integer that may be zero, and is zero if absent.
    ///
    /// # Errors
    /// If it is present but not an integer, or too large.
    pub fn number(&self, key: Key) -> Result<usize> {
        match self.get(key).map(|value| value.as_u64()) {
            None | Some(Some(0)) => Ok(0),
            Some(_) => self.count(key),
        }
    }

    /// The factor of the weights of the chosen experts. In GGUF files zero means no factor.
    ///
    /// # Errors
    /// If it is present but not a positive number.
    pub fn router_scale(&self) -> Result<f32> {
        let scale = match self.format() {
            Format::Gguf => self.nonzero_float(keys::ROUTER_SCALE)?.map(|scale| scale as f32),
            Format::HuggingFace | Format::Mlx => self.optional_float(keys::ROUTER_SCALE)?,
        };
        Ok(scale.unwrap_or(1.0))
    }

    /// An optional positive float; zero counts as absent.
    ///
    /// # Errors
    /// If it is present but not zero or a positive finite number.
    pub fn nonzero_float(&self, key: Key) -> Result<Option<f64>> {
        match self.get(key).map(|value| value.as_f64()) {
            Some(Some(0.0)) => Ok(None),
            _ => Ok(self.optional_float(key)?.map(f64::from)),
        }
    }

    /// Refuses a setting that is true.
    ///
    /// # Errors
    /// [`Error::Unsupported`], with the name of the setting.
    pub fn refuse_true(&self, key: Key) -> Result<()> {
        match self.optional_bool(key)? {
            Some(true) => Err(self.unsupported(key, "true")),
            _ => Ok(()),
        }
    }

    /// Refuses a setting that is false.
    ///
    /// # Errors
    /// [`Error::Unsupported`], with the name of the setting.
    pub fn refuse_false(&self, key: Key) -> Result<()> {
        match self.optional_bool(key)? {
            Some(false) => Err(self.unsupported(key, "false")),
            _ => Ok(()),
        }
    }

    /// Refuses a factor that is present and not one.
    ///
    /// # Errors
    /// [`Error::Unsupported`], with the name of the setting and its value.
    pub fn refuse_factor(&self, key: Key) -> Result<()> {
        match self.get(key) {
            Some(value) if value.as_f64() != Some(1.0) => Err(self.unsupported(key, &unread::shown(&value))),
            _ => Ok(()),
        }
    }

    /// The error for a setting that is missing, or whose list has no value for the layer.
    pub fn missing(&self, key: Key) -> Error {
        match (self.layer, self.setting(key)) {
            (Some((layer, _)), Some(_)) => self.error(key, &format!("has no value for layer {layer}")),
            _ => self.error(key, "is missing"),
        }
    }

    /// An error about a setting.
    pub fn error(&self, key: Key, problem: &str) -> Error {
        Error::format(&self.file.settings_path(), format!("{} {problem}", self.name(key)))
    }

    /// The error for a setting that is not supported.
    pub fn unsupported(&self, key: Key, value: &str) -> Error {
        let path = self.file.settings_path();
        let name = self.name(key);
        Error::Unsupported(format!("{}: {name} = {} is not supported", path.display(), Quoted(value)))
    }

    fn get(&self, key: Key) -> Option<Cow<'a, Value>> {
        let (_, value) = self.setting(key)?;
        match (self.layer, value.as_numbers()) {
            (Some((layer, _)), Some(list)) => list.iter().nth(layer).map(Cow::Owned),
            _ => Some(Cow::Borrowed(value)),
        }
    }

    /// The name of the setting in this kind of file.
    fn name(&self, key: Key) -> String {
        self.setting(key).map_or_else(|| self.file.setting_name(&key), |(name, _)| name)
    }

    /// A setting as the file has it, which may be a list with a number for each layer, and its whole name.
    fn setting(&self, key: Key) -> Option<(String, &'a Value)> {
        let names = self.names(key);
        self.read.borrow_mut().extend(names.iter().cloned());
        // A family that reads what one kind of layers has also reads what the other has, if there are such layers.
        if let Some((layer, kind)) = self.layer {
            let other = if kind == LayerKind::Full { LayerKind::Windowed } else { LayerKind::Full };
            self.read.borrow_mut().extend(self.own_names(key, layer, other));
        }
        names
            .into_iter()
            .find_map(|name| {
                let whole = match self.format() {
                    Format::Gguf => format!("{}.{name}", self.architecture()),
                    Format::HuggingFace | Format::Mlx => name.into_owned(),
                };
                self.file.metadata.get(&whole).map(|value| (whole, value))
            })
            .or_else(|| self.omitted_setting(key))
    }

    /// A setting that the folder omits.
    fn omitted_setting(&self, key: Key) -> Option<(String, &'a Value)> {
        let names = if self.format() == Format::Gguf { &[] } else { key.hugging_face };
        let known = self.omitted.get().iter().find(|(name, _)| names.contains(name));
        known.map(|(name, value)| ((*name).to_owned(), value))
    }

    /// The names that a setting may have, without the architecture. Those of the layer or its kind come first.
    fn names(&self, key: Key) -> Vec<Cow<'static, str>> {
        let of_window = matches!(self.layer, Some((_, LayerKind::Windowed)));
        let general: &[&'static str] = match self.format() {
            Format::Gguf if key.gguf.is_empty() => return Vec::new(),
            // The scaling of the rotation is that of layers without a window.
            Format::Gguf if of_window && key.gguf.starts_with("rope.scal") => return Vec::new(),
            Format::Gguf => &[key.gguf],
            Format::HuggingFace | Format::Mlx => key.hugging_face,
        };
        let own = self.layer.map_or_else(Vec::new, |(layer, kind)| self.own_names(key, layer, kind));
        own.into_iter().chain(general.iter().map(|&name| Cow::Borrowed(name))).collect()
    }

    /// The names of a setting of one layer or of its kind.
    fn own_names(&self, key: Key, layer: usize, kind: LayerKind) -> Vec<Cow<'static, str>> {
        let names: Vec<String> = match (self.format(), kind) {
            (Format::Gguf, LayerKind::Full) => Vec::new(),
            (Format::Gguf, LayerKind::Windowed) => vec![format!("{}_swa", key.gguf)],
            (Format::HuggingFace | Format::Mlx, _) => {
                // A list with nulls is stored number by number.
                let of_layer =
                    |name: &str| [format!("per_layer_config.{layer}.{name}"), format!("{name}.{layer}")];
                let own = |name: &&str| of_layer(name).into_iter().chain(kind.setting(name));
                key.hugging_face.iter().flat_map(own).collect()
            }
        };
        names.into_iter().map(Cow::Owned).collect()
    }
}

/// A boolean, or whether a number is not zero.
fn truth(value: &Value) -> Option<bool> {
    value.as_bool().or_else(|| value.as_f64().map(|number| number != 0.0))
}

impl LayerKind {
    /// What a setting of folders is called if it is that of this kind of layers.
    fn setting(self, name: &str) -> Option<String> {
        match (self, name) {
            (LayerKind::Full, "head_dim") => Some("global_head_dim".to_owned()),
            (LayerKind::Full, "num_key_value_heads") => Some("num_global_key_value_heads".to_owned()),
            _ => {
                let setting = name.strip_prefix("rope_parameters.")?;
                Some(format!("rope_parameters.{}.{setting}", self.name()))
            }
        }
    }

    /// Its name in folders.
    pub fn name(self) -> &'static str {
        match self {
            LayerKind::Full => "full_attention",
            LayerKind::Windowed => "sliding_attention",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::blocks::rope::{RopeScaling, Yarn};

    /// A folder with these settings and a tensor.
    fn folder(path: &Path, settings: &serde_json::Value) -> ModelFile {
        let header = r#"{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat();
        std::fs::write(path.join("model.safetensors"), file).unwrap();
        std::fs::write(path.join("config.json"), settings.to_string()).unwrap();
        ModelFile::open(path).unwrap()
    }

    #[test]
    fn stretched_frequencies_are_those_of_transformers() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/rope.json");
        let cases: Vec<serde_json::Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert!(cases.len() > 10);
        let temporary = tempfile::tempdir().unwrap();
        for case in &cases {
            let file = folder(temporary.path(), &case["settings"]);
            let config = Config::new(&file);
            let scaling = config.rope_scaling().unwrap();
            let base = config.float(keys::ROPE_BASE).unwrap();
            let ours = scaling.frequencies(base, case["channels"].as_u64().unwrap() as usize);
            let theirs = case["frequencies"].as_array().unwrap().iter().map(|f| f.as_f64().unwrap());
            assert_eq!(ours.len(), theirs.len(), "{case}");
            for (ours, theirs) in ours.into_iter().map(f64::from).zip(theirs) {
                assert!((ours - theirs).abs() < 2e-6 * theirs, "{ours} instead of {theirs}: {case}");
            }
            let scale = case["scale"].as_f64().unwrap();
            assert!((f64::from(scaling.scale()) - scale).abs() < 1e-6, "{case}");
            assert_eq!(config.context().unwrap(), config.count(keys::CONTEXT).unwrap(), "{case}");
        }
    }

    #[test]
    fn a_layer_has_its_own_settings_or_those_of_its_kind_or_those_of_all() {
        let temporary = tempfile::tempdir().unwrap();
        let settings = serde_json::json!({
            "head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 4, "hidden_size": 64,
            "per_layer_config": {"3": {"head_dim": 48}},
            "rope_theta": 1.0, "rope_parameters": {"sliding_attention": {"rope_theta": 2.0}}
        });
        let file = folder(temporary.path(), &settings);
        let config = Config::new(&file);
        let dims = |kind| [2, 3].map(|l| config.of_layer(l, kind).count(keys::KEY_DIM).unwrap());
        assert_eq!([dims(LayerKind::Windowed), dims(LayerKind::Full)], [[16, 48], [32, 48]]);
        assert_eq!(config.count(keys::KEY_DIM).unwrap(), 16);
        let own = config.of_layer(2, LayerKind::Full);
        assert_eq!([own.count(keys::KV_HEADS).unwrap(), own.count(keys::HIDDEN).unwrap()], [4, 64]);
        let base = |kind| config.of_layer(2, kind).float(keys::ROPE_BASE).unwrap();
        assert_eq!([base(LayerKind::Full), base(LayerKind::Windowed)], [1.0, 2.0]);
    }

    #[test]
    fn omitted_settings_have_the_values_of_the_family() {
        let temporary = tempfile::tempdir().unwrap();
        let file = folder(temporary.path(), &serde_json::json!({"num_attention_heads": 4}));
        let config = Config::new(&file);
        config.assume(&[
            ("num_attention_heads", Value::Unsigned(8)),
            ("max_position_embeddings", Value::Unsigned(99)),
        ]);
        let own = config.of_layer(0, LayerKind::Full);
        for config in [&config, &own] {
            assert_eq!([config.count(keys::HEADS).unwrap(), config.context().unwrap()], [4, 99]);
            assert!(config.count(keys::HIDDEN).is_err());
        }
    }

    #[test]
    fn the_scale_of_long_contexts_is_given_or_follows_from_the_lengths() {
        let temporary = tempfile::tempdir().unwrap();
        let long = |rope: serde_json::Value| {
            let settings = serde_json::json!({
                "max_position_embeddings": 4096, "original_max_position_embeddings": 64, "rope_scaling": rope
            });
            let file = folder(temporary.path(), &settings);
            let config = Config::new(&file);
            (config.rope_scaling().unwrap().scale(), config.context().unwrap())
        };
        assert_eq!(long(serde_json::json!({"type": "su", "short_mscale": 1.5})), (1.5, 64));
        assert_eq!(long(serde_json::json!({"rope_type": "longrope", "attention_factor": 0.5})), (0.5, 64));
        assert_eq!(long(serde_json::json!({"rope_type": "longrope", "factor": 1.0})), (1.0, 64));
        // √(1 + ln 64 / ln 64)
        assert!((long(serde_json::json!({"rope_type": "longrope"})).0 - 2f32.sqrt()).abs() < 1e-6);
    }

    #[test]
    fn yarn_makes_the_context_longer_than_the_original() {
        let temporary = tempfile::tempdir().unwrap();
        let context = |rope: serde_json::Value| {
            let settings = serde_json::json!({ "max_position_embeddings": 40_960, "rope_scaling": rope });
            Config::new(&folder(temporary.path(), &settings)).context()
        };
        let yarn = |factor: f64| {
            context(serde_json::json!({
                "type": "yarn", "factor": factor, "original_max_position_embeddings": 32_768
            }))
        };
        assert_eq!(yarn(4.0).unwrap(), 131_072);
        assert_eq!(yarn(1.0).unwrap(), 40_960);
        assert!(yarn(1e6).unwrap_err().to_string().contains("absurdly"));
        assert_eq!(context(serde_json::json!({ "type": "linear", "factor": 4.0 })).unwrap(), 40_960);
    }

    #[test]
    fn the_original_context_beside_the_other_settings_precedes() {
        let temporary = tempfile::tempdir().unwrap();
        let file = folder(
            temporary.path(),
            &serde_json::json!({
                "max_position_embeddings": 131_072, "original_max_position_embeddings": 4096,
                "rope_scaling": { "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192 }
            }),
        );
        let scaling = Config::new(&file).rope_scaling().unwrap();
        assert!(matches!(scaling, RopeScaling::Yarn(Yarn { original: 4096.0, .. })), "{scaling:?}");
    }

    #[test]
    fn a_layer_has_settings_of_its_own_and_of_its_kind() {
        let temporary = tempfile::tempdir().unwrap();
        let file = folder(
            temporary.path(),
            &serde_json::json!({
                "num_attention_heads": 8,
                "per_layer_config": { "1": { "num_attention_heads": 6 } },
                "num_key_value_heads": [2, 4, 1],
                "swiglu_limits": [null, 0.5, 0.0],
                "rope_theta": 1e6,
                "rope_parameters": {
                    "full_attention": { "rope_theta": 3e6, "rope_type": "linear", "factor": 4.0 },
                    "sliding_attention": { "rope_theta": 2e6, "rope_type": "default" }
                }
            }),
        );
        let limits = Key { gguf: "", hugging_face: &["swiglu_limits"] };
        let config = Config::new(&file);
        assert_eq!(config.float(keys::ROPE_BASE).unwrap(), 1e6);
        let expected = [
            (0, LayerKind::Full, 8, 2, None, 3e6, RopeScaling::Linear(4.0)),
            (1, LayerKind::Windowed, 6, 4, Some(0.5), 2e6, RopeScaling::Plain),
            (2, LayerKind::Full, 8, 1, None, 3e6, RopeScaling::Linear(4.0)),
        ];
        for (layer, kind, heads, kv_heads, limit, base, scaling) in expected {
            let config = config.of_layer(layer, kind);
            assert_eq!(config.count(keys::HEADS).unwrap(), heads);
            assert_eq!(config.count(keys::KV_HEADS).unwrap(), kv_heads);
            assert_eq!(config.nonzero_float(limits).unwrap(), limit);
            assert_eq!(config.float(keys::ROPE_BASE).unwrap(), base);
            assert_eq!(config.rope_scaling().unwrap(), scaling);
        }
        let error = config.of_layer(3, LayerKind::Full).count(keys::KV_HEADS).unwrap_err().to_string();
        assert!(error.contains("num_key_value_heads has no value for layer 3"), "{error}");
        assert!(config.has_read("rope_parameters.sliding_attention.factor"));
    }

    #[test]
    fn gguf_files_scale_the_rotation_of_layers_without_a_window_only() {
        let mut metadata = crate::format::Metadata::default();
        let settings = [
            ("general.architecture", Value::String("x".into())),
            ("x.rope.freq_base", Value::Float(1e6)),
            ("x.rope.freq_base_swa", Value::Float(1e4)),
            ("x.rope.scaling.type", Value::String("linear".into())),
            ("x.rope.scaling.factor", Value::Float(2.0)),
        ];
        settings.into_iter().for_each(|(key, value)| metadata.insert(key.into(), value).unwrap());
        let file = ModelFile::without_tensors(Path::new("x.gguf"), metadata);
        let config = Config::new(&file);
        for (kind, base, scaling) in
            [(LayerKind::Full, 1e6, RopeScaling::Linear(2.0)), (LayerKind::Windowed, 1e4, RopeScaling::Plain)]
        {
            let config = config.of_layer(0, kind);
            assert_eq!(config.float(keys::ROPE_BASE).unwrap(), base);
            assert_eq!(config.rope_scaling().unwrap(), scaling);
        }
    }
}
