//! A model's configuration in its file's settings. Every value is hostile until checked.

use super::keys;
use crate::blocks::rope::{Llama3, RopeScaling, Yarn};
use crate::error::{Error, Result};
use crate::format::{Format, Key, ModelFile, Quoted, StringArray, Value};

/// No real model has a dimension or a count above this. The limit keeps products of two in range.
const LARGEST: u64 = 1 << 30;

/// The settings of a model, whatever kind of file they are in.
pub struct Config<'a> {
    file: &'a ModelFile,
}

impl<'a> Config<'a> {
    /// The configuration of a model.
    pub fn new(file: &'a ModelFile) -> Config<'a> {
        Config { file }
    }

    /// The container, where a family's defaults depend on it.
    pub fn format(&self) -> Format {
        self.file.format
    }

    /// A positive integer that must be there.
    ///
    /// # Errors
    /// If it is missing, not an integer, zero or absurdly large.
    pub fn count(&self, key: Key) -> Result<usize> {
        self.optional_count(key)?.ok_or_else(|| self.error(key, "is missing"))
    }

    /// A positive integer that may be absent.
    ///
    /// # Errors
    /// If it is there and not an integer, zero or absurdly large.
    pub fn optional_count(&self, key: Key) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(v @ 1..=LARGEST) => Ok(Some(v as usize)),
            Some(v) => Err(self.error(key, &format!("is {v}, not between 1 and {LARGEST}"))),
            None => Err(self.error(key, "is not a positive integer")),
        }
    }

    /// A positive float that must be there.
    ///
    /// # Errors
    /// If it is missing, or not a positive finite number.
    pub fn float(&self, key: Key) -> Result<f32> {
        self.optional_float(key)?.ok_or_else(|| self.error(key, "is missing"))
    }

    /// A positive float that may be absent.
    ///
    /// # Errors
    /// If it is there and not a positive finite number.
    pub fn optional_float(&self, key: Key) -> Result<Option<f32>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().map(|v| v as f32) {
            Some(v) if v > 0.0 && v.is_finite() => Ok(Some(v)),
            _ => Err(self.error(key, "is not a positive number")),
        }
    }

    /// A truth value that may be absent.
    ///
    /// # Errors
    /// If it is there and not a truth value.
    pub fn optional_bool(&self, key: Key) -> Result<Option<bool>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.error(key, "is not a truth value"))
    }

    /// A text that may be absent.
    ///
    /// # Errors
    /// If it is there and not text.
    pub fn optional_text(&self, key: Key) -> Result<Option<&'a str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.error(key, "is not text"))
    }

    /// A list of texts that may be absent.
    ///
    /// # Errors
    /// If it is there and something else.
    pub fn optional_texts(&self, key: Key) -> Result<Option<&'a StringArray>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_strings().map(Some).ok_or_else(|| self.error(key, "is not a list of texts"))
    }

    /// The layers of the text model. GGUF files count those that predict further tokens, too.
    ///
    /// # Errors
    /// If their number is missing, absurd, or smaller than that of the others.
    pub fn layers(&self) -> Result<usize> {
        let layers = self.count(keys::LAYERS)?;
        let extra = match self.format() {
            Format::Gguf => self.number(keys::EXTRA_LAYERS)?,
            Format::HuggingFace | Format::Mlx => 0,
        };
        match layers.checked_sub(extra) {
            Some(layers @ 1..) => Ok(layers),
            _ => Err(self.error(keys::EXTRA_LAYERS, "leaves no layers to the model")),
        }
    }

    /// A number of things that may be none, as it is if nothing is said.
    ///
    /// # Errors
    /// If it is there and not an integer, or absurdly large.
    pub fn number(&self, key: Key) -> Result<usize> {
        match self.get(key).map(Value::as_u64) {
            None | Some(Some(0)) => Ok(0),
            Some(_) => self.count(key),
        }
    }

    /// The longest context that the model was made for: as long as YaRN stretches it, even where the file gives the
    /// original length.
    ///
    /// # Errors
    /// If it is missing or makes no sense.
    pub fn context(&self) -> Result<usize> {
        let context = self.count(keys::CONTEXT)?;
        match self.rope_scaling()? {
            RopeScaling::Yarn(yarn) => {
                let stretched = yarn.original * yarn.factor;
                if stretched > LARGEST as f64 {
                    return Err(self.error(keys::ROPE_FACTOR, "makes the context absurdly long"));
                }
                Ok(context.max(stretched as usize))
            }
            _ => Ok(context),
        }
    }

    /// What multiplies the weights of the chosen experts. In GGUF files zero is as good as nothing.
    ///
    /// # Errors
    /// If it is there and not a positive number.
    pub fn router_scale(&self) -> Result<f32> {
        let scale = match self.format() {
            Format::Gguf => self.nonzero_float(keys::ROUTER_SCALE)?.map(|scale| scale as f32),
            Format::HuggingFace | Format::Mlx => self.optional_float(keys::ROUTER_SCALE)?,
        };
        Ok(scale.unwrap_or(1.0))
    }

    /// How the rotation is stretched. GGUF files of Llama 3 do not say it here, but in a tensor.
    ///
    /// # Errors
    /// If it is in a way that is not supported, or a number for it is missing or makes no sense.
    pub fn rope_scaling(&self) -> Result<RopeScaling> {
        match self.optional_text(keys::ROPE_SCALING)? {
            Some("none" | "default") => Ok(RopeScaling::Plain),
            Some("linear") => Ok(RopeScaling::Linear(self.float(keys::ROPE_FACTOR)?.into())),
            Some("llama3") => self.llama3().map(RopeScaling::Llama3),
            Some("yarn") => self.yarn().map(RopeScaling::Yarn),
            Some(other) => Err(self.unsupported(keys::ROPE_SCALING, other)),
            None => self.untyped_rope_scaling(),
        }
    }

    /// In GGUF files, a factor without a type means linear scaling; older ones have it under another name.
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

    fn llama3(&self) -> Result<Llama3> {
        let (low, high) = (self.float(keys::ROPE_LOW)?.into(), self.float(keys::ROPE_HIGH)?.into());
        if low >= high {
            return Err(self.error(keys::ROPE_HIGH, "is not above the low one"));
        }
        let original = self.count(keys::ROPE_ORIGINAL)? as f64;
        Ok(Llama3 { factor: self.float(keys::ROPE_FACTOR)?.into(), original, low, high })
    }

    fn yarn(&self) -> Result<Yarn> {
        for key in [keys::ROPE_ATTENTION_MULTIPLIER, keys::ROPE_EXTRAPOLATION] {
            if let Some(other) = self.optional_float(key)?.filter(|&factor| factor != 1.0) {
                return Err(self.unsupported(key, &other.to_string()));
            }
        }
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
            // GGUF files have only one of the two, and mean both.
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

    /// A positive float that may be absent, or zero and count as absent.
    fn nonzero_float(&self, key: Key) -> Result<Option<f64>> {
        match self.get(key).map(Value::as_f64) {
            Some(Some(0.0)) => Ok(None),
            _ => Ok(self.optional_float(key)?.map(f64::from)),
        }
    }

    /// Refuses a setting that is there and not zero.
    ///
    /// # Errors
    /// [`Error::Unsupported`], which names the setting and its value.
    pub fn refuse_nonzero(&self, key: Key) -> Result<()> {
        match self.get(key) {
            None => Ok(()),
            Some(value) if value.as_f64() == Some(0.0) => Ok(()),
            Some(value) => {
                let number = value.as_f64().map(|number| (number as f32).to_string());
                let shown = number.unwrap_or_else(|| "a value that is not a number".to_owned());
                Err(self.unsupported(key, &shown))
            }
        }
    }

    /// An error about a setting.
    pub fn error(&self, key: Key, problem: &str) -> Error {
        Error::format(&self.file.settings_path(), format!("{} {problem}", self.name(key)))
    }

    /// Something that the file asks for and we do not have.
    pub fn unsupported(&self, key: Key, value: &str) -> Error {
        let path = self.file.settings_path();
        let name = self.name(key);
        Error::Unsupported(format!("{}: {name} = {} is not supported", path.display(), Quoted(value)))
    }

    fn get(&self, key: Key) -> Option<&'a Value> {
        self.file.setting(&key).map(|(_, value)| value)
    }

    /// What the setting is called in this file, or would be.
    fn name(&self, key: Key) -> String {
        self.file.setting(&key).map_or_else(|| self.file.setting_name(&key), |(name, _)| name)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

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
}
