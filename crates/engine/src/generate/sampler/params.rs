//! Sampling parameters, and where each value comes from: the caller, the model's file, or the defaults.

use std::path::Path;

use crate::TokenId;
use crate::error::{Error, Result};
use crate::format::{Metadata, Value};

/// How the next token is chosen. [The module](super) lists the steps in order.
///
/// # Examples
/// ```
/// use forebay_engine::{Request, SamplingParams};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
/// let greedy = SamplingParams { temperature: 0.0, ..Default::default() };
/// let request = Request::new(&engine, prompt)?.sampling(greedy).max_tokens(6);
/// let answer = engine.session().generate(&request, &mut |_| ())?;
/// assert_eq!(answer.text, ", there was a little girl");
///
/// let wrong = SamplingParams { top_p: 1.5, ..Default::default() };
/// assert_eq!(wrong.validate().unwrap_err().to_string(), "top_p is 1.5, but must be between 0 and 1");
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Flattens (above 1) or sharpens (below 1) the distribution; 0 always takes the likeliest token. At least 0.
    pub temperature: f32,
    /// Only this many of the likeliest tokens stay; 0 keeps all.
    pub top_k: usize,
    /// The likeliest tokens that together hold this share of the probability stay. 0 to 1: 0 keeps only the
    /// likeliest, 1 keeps all.
    pub top_p: f32,
    /// Tokens at least this many times as likely as the likeliest stay. 0 to 1: 0 keeps all.
    pub min_p: f32,
    /// Positive logits of tokens that occurred are divided by this, negative ones multiplied. Above 0; 1 is off.
    pub repeat_penalty: f32,
    /// Subtracted from the logit of each token that occurs in the answer. -2 to 2; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each occurrence in the answer. -2 to 2; 0 is off.
    pub frequency_penalty: f32,
    /// How many of the last tokens the three penalties consider; 0 turns them off, `usize::MAX` is the whole
    /// conversation.
    pub penalty_last_n: usize,
    /// Added to the logits of these tokens; biases of a token that is listed twice add up. A finite number, or minus
    /// infinity for a token that must never be chosen.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// The seed of the random numbers; `None` draws a new seed for each sampler.
    pub seed: Option<u64>,
}

impl Default for SamplingParams {
    fn default() -> SamplingParams {
        SamplingParams {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_last_n: 64,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

impl SamplingParams {
    /// Checks that every value is in its range; the error names the parameter, its value and the range.
    pub fn validate(&self) -> Result<()> {
        let checks = [
            (&TEMPERATURE, self.temperature),
            (&TOP_P, self.top_p),
            (&MIN_P, self.min_p),
            (&REPEAT_PENALTY, self.repeat_penalty),
            (&PRESENCE_PENALTY, self.presence_penalty),
            (&FREQUENCY_PENALTY, self.frequency_penalty),
        ];
        for (param, value) in checks {
            if !(param.admits)(value) {
                let message = format!("{} is {value}, but must be {}", param.name, param.range);
                return Err(Error::field(param.name, message));
            }
        }
        if let Some((token, bias)) = self.logit_bias.iter().find(|(_, b)| b.is_nan() || *b == f32::INFINITY) {
            let message = format!(
                "logit_bias of token {} is {bias}, but must be a finite number or minus infinity",
                token.0
            );
            return Err(Error::field("logit_bias", message));
        }
        Ok(())
    }

    /// Replaces several biases of a token by their sum. Each bias costs time for every token of the answer, and a
    /// caller may list a token any number of times.
    pub(super) fn merge_bias(&mut self) {
        self.logit_bias.sort_by_key(|(token, _)| *token);
        self.logit_bias.dedup_by(|(token, bias), (kept, sum)| {
            let same = token == kept;
            if same {
                *sum = (*sum + *bias).min(f32::MAX);
            }
            same
        });
    }

    /// Whether any penalty has an effect.
    pub(super) fn has_penalties(&self) -> bool {
        self.repeat_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether bias and penalties raise no logit.
    pub(super) fn only_lowers(&self) -> bool {
        let penalties = [self.repeat_penalty - 1.0, self.presence_penalty, self.frequency_penalty];
        penalties.iter().all(|&penalty| penalty >= 0.0)
            && self.logit_bias.iter().all(|(_, bias)| *bias <= 0.0)
    }
}

/// The parameters that the caller sets. Others come from the model's file or, if it has none, from the defaults.
///
/// # Examples
/// ```
/// use forebay_engine::{ChatRequest, SamplingOverrides};
///
/// let sampling = SamplingOverrides { temperature: Some(0.2), seed: Some(7), ..Default::default() };
/// sampling.validate()?;
/// let request = ChatRequest::user("Tell me a story.").sampling(sampling);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingOverrides {
    /// Overrides [`SamplingParams::temperature`].
    pub temperature: Option<f32>,
    /// Overrides [`SamplingParams::top_k`].
    pub top_k: Option<usize>,
    /// Overrides [`SamplingParams::top_p`].
    pub top_p: Option<f32>,
    /// Overrides [`SamplingParams::min_p`].
    pub min_p: Option<f32>,
    /// Overrides [`SamplingParams::repeat_penalty`].
    pub repeat_penalty: Option<f32>,
    /// Overrides [`SamplingParams::presence_penalty`].
    pub presence_penalty: Option<f32>,
    /// Overrides [`SamplingParams::frequency_penalty`].
    pub frequency_penalty: Option<f32>,
    /// Overrides [`SamplingParams::penalty_last_n`].
    pub penalty_last_n: Option<usize>,
    /// Overrides [`SamplingParams::logit_bias`].
    pub logit_bias: Option<Vec<(TokenId, f32)>>,
    /// Overrides [`SamplingParams::seed`].
    pub seed: Option<u64>,
}

impl From<SamplingParams> for SamplingOverrides {
    /// Overrides every parameter.
    fn from(params: SamplingParams) -> SamplingOverrides {
        SamplingOverrides {
            temperature: Some(params.temperature),
            top_k: Some(params.top_k),
            top_p: Some(params.top_p),
            min_p: Some(params.min_p),
            repeat_penalty: Some(params.repeat_penalty),
            presence_penalty: Some(params.presence_penalty),
            frequency_penalty: Some(params.frequency_penalty),
            penalty_last_n: Some(params.penalty_last_n),
            logit_bias: Some(params.logit_bias),
            seed: params.seed,
        }
    }
}

impl SamplingOverrides {
    /// These values, with those that `other` sets taking precedence.
    pub fn overruled_by(self, other: SamplingOverrides) -> SamplingOverrides {
        SamplingOverrides {
            temperature: other.temperature.or(self.temperature),
            top_k: other.top_k.or(self.top_k),
            top_p: other.top_p.or(self.top_p),
            min_p: other.min_p.or(self.min_p),
            repeat_penalty: other.repeat_penalty.or(self.repeat_penalty),
            presence_penalty: other.presence_penalty.or(self.presence_penalty),
            frequency_penalty: other.frequency_penalty.or(self.frequency_penalty),
            penalty_last_n: other.penalty_last_n.or(self.penalty_last_n),
            logit_bias: other.logit_bias.or(self.logit_bias),
            seed: other.seed.or(self.seed),
        }
    }

    /// Checks that every value that is set is in its range; the error names the parameter, its value and the range.
    ///
    /// # Errors
    /// [`Error::Field`] with the first parameter that is out of range.
    pub fn validate(&self) -> Result<()> {
        self.resolve(&Metadata::default(), Path::new("")).map(drop)
    }

    /// The parameters in effect for the model with this metadata, at `path`.
    ///
    /// An invalid value in the file is an error, unless the caller sets that parameter.
    pub fn resolve(&self, metadata: &Metadata, path: &Path) -> Result<SamplingParams> {
        let file = FileDefaults { metadata, path };
        let default = SamplingParams::default();
        let params = SamplingParams {
            temperature: file.float(&TEMPERATURE, self.temperature, default.temperature)?,
            top_k: file.count(&TOP_K, self.top_k, default.top_k)?,
            top_p: file.float(&TOP_P, self.top_p, default.top_p)?,
            min_p: file.float(&MIN_P, self.min_p, default.min_p)?,
            repeat_penalty: file.float(&REPEAT_PENALTY, self.repeat_penalty, default.repeat_penalty)?,
            presence_penalty: self.presence_penalty.unwrap_or(default.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(default.frequency_penalty),
            penalty_last_n: file.count(&PENALTY_LAST_N, self.penalty_last_n, default.penalty_last_n)?,
            logit_bias: self.logit_bias.clone().unwrap_or_default(),
            seed: self.seed,
        };
        params.validate()?;
        Ok(params)
    }
}

/// A parameter that is a real number.
struct Float {
    name: &'static str,
    /// Its keys in GGUF metadata and in `generation_config.json`; none for those that a file cannot set.
    keys: &'static [&'static str],
    /// The range in words, to follow "must be".
    range: &'static str,
    /// False for NaN, like every comparison.
    admits: fn(f32) -> bool,
}

const TEMPERATURE: Float = Float {
    name: "temperature",
    keys: &["general.sampling.temp", "generation_config.temperature"],
    range: "a finite number of at least 0",
    admits: |v| (0.0..=f32::MAX).contains(&v),
};
const TOP_P: Float = Float {
    name: "top_p",
    keys: &["general.sampling.top_p", "generation_config.top_p"],
    range: "between 0 and 1",
    admits: |v| (0.0..=1.0).contains(&v),
};
const MIN_P: Float = Float {
    name: "min_p",
    keys: &["general.sampling.min_p", "generation_config.min_p"],
    range: "between 0 and 1",
    admits: |v| (0.0..=1.0).contains(&v),
};
const REPEAT_PENALTY: Float = Float {
    name: "repeat_penalty",
    keys: &["general.sampling.penalty_repeat", "generation_config.repetition_penalty"],
    range: "a finite number above 0",
    admits: |v| v > 0.0 && v.is_finite(),
};
const PRESENCE_PENALTY: Float = Float {
    name: "presence_penalty",
    keys: &[],
    range: "between -2 and 2",
    admits: |v| (-2.0..=2.0).contains(&v),
};
const FREQUENCY_PENALTY: Float = Float { name: "frequency_penalty", ..PRESENCE_PENALTY };

/// A parameter that is a count.
struct Count {
    name: &'static str,
    /// Its keys in GGUF metadata and in `generation_config.json`, where it is a signed integer.
    keys: &'static [&'static str],
    /// What -1 means in a file.
    minus_one: usize,
}

const TOP_K: Count =
    Count { name: "top_k", keys: &["general.sampling.top_k", "generation_config.top_k"], minus_one: 0 };
const PENALTY_LAST_N: Count =
    Count { name: "penalty_last_n", keys: &["general.sampling.penalty_last_n"], minus_one: usize::MAX };

/// The sampling parameters that the author of a model recommends in its file. They are as untrusted as the rest of the
/// file.
struct FileDefaults<'a> {
    metadata: &'a Metadata,
    path: &'a Path,
}

impl FileDefaults<'_> {
    /// The user's value, or the file's, or the default.
    fn float(&self, param: &Float, user: Option<f32>, default: f32) -> Result<f32> {
        if let Some(value) = user {
            return Ok(value);
        }
        let Some((key, value)) = self.find(param.keys) else { return Ok(default) };
        match value.as_f64().map(|v| v as f32) {
            Some(v) if (param.admits)(v) => Ok(v),
            _ => Err(self.refuse(param.name, key, value, param.range)),
        }
    }

    /// The user's value, or the file's, or the default.
    fn count(&self, param: &Count, user: Option<usize>, default: usize) -> Result<usize> {
        if let Some(value) = user {
            return Ok(value);
        }
        match self.find(param.keys) {
            None => Ok(default),
            Some((_, Value::Signed(-1))) => Ok(param.minus_one),
            Some((key, value)) => value
                .as_u64()
                .and_then(|v| usize::try_from(v).ok())
                .ok_or_else(|| self.refuse(param.name, key, value, "an integer of at least -1")),
        }
    }

    fn find(&self, keys: &[&'static str]) -> Option<(&'static str, &Value)> {
        keys.iter().find_map(|&key| Some((key, self.metadata.get(key)?)))
    }

    fn refuse(&self, name: &str, key: &str, value: &Value, range: &str) -> Error {
        let value = match value {
            Value::Unsigned(v) => v.to_string(),
            Value::Signed(v) => v.to_string(),
            Value::Float(v) => v.to_string(),
            Value::Bool(v) => v.to_string(),
            Value::String(_) => "text".into(),
            Value::Strings(_) | Value::Numbers(_) => "a list".into(),
        };
        let message = format!("{key} is {value}, but must be {range}; set {name} yourself to override it");
        Error::format(self.path, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata<const N: usize>(entries: [(&str, Value); N]) -> Metadata {
        let mut metadata = Metadata::default();
        for (key, value) in entries {
            metadata.insert(key.into(), value).expect("keys differ");
        }
        metadata
    }

    fn resolve(user: SamplingOverrides, entries: &Metadata) -> Result<SamplingParams> {
        user.resolve(entries, Path::new("model.gguf"))
    }

    fn all_file_values() -> Metadata {
        metadata([
            ("general.sampling.temp", Value::Float(0.5)),
            ("general.sampling.top_k", Value::Signed(20)),
            ("general.sampling.top_p", Value::Float(0.25)),
            ("general.sampling.min_p", Value::Unsigned(0)),
            ("general.sampling.penalty_last_n", Value::Signed(32)),
            ("general.sampling.penalty_repeat", Value::Float(1.5)),
        ])
    }

    #[test]
    fn a_silent_file_gives_the_defaults() {
        let params = resolve(SamplingOverrides::default(), &Metadata::default()).unwrap();
        assert_eq!(params, SamplingParams::default());
    }

    #[test]
    fn the_file_overrules_the_defaults() {
        let params = resolve(SamplingOverrides::default(), &all_file_values()).unwrap();
        let expected = SamplingParams {
            temperature: 0.5,
            top_k: 20,
            top_p: 0.25,
            min_p: 0.0,
            penalty_last_n: 32,
            repeat_penalty: 1.5,
            ..SamplingParams::default()
        };
        assert_eq!(params, expected);
    }

    #[test]
    fn generation_settings_of_a_folder_overrule_the_defaults() {
        let entries = metadata([
            ("generation_config.temperature", Value::Float(0.6)),
            ("generation_config.top_k", Value::Unsigned(20)),
            ("generation_config.top_p", Value::Float(0.9)),
            ("generation_config.min_p", Value::Unsigned(0)),
            ("generation_config.repetition_penalty", Value::Float(1.05)),
        ]);
        let params = resolve(SamplingOverrides::default(), &entries).unwrap();
        let expected = SamplingParams {
            temperature: 0.6,
            top_k: 20,
            top_p: 0.9,
            min_p: 0.0,
            repeat_penalty: 1.05,
            ..SamplingParams::default()
        };
        assert_eq!(params, expected);
    }

    #[test]
    fn the_user_overrules_the_file() {
        let user = SamplingOverrides {
            temperature: Some(1.25),
            top_k: Some(7),
            top_p: Some(0.75),
            min_p: Some(0.125),
            repeat_penalty: Some(1.0),
            presence_penalty: Some(-2.0),
            frequency_penalty: Some(2.0),
            penalty_last_n: Some(usize::MAX),
            logit_bias: Some(vec![(TokenId(3), f32::NEG_INFINITY)]),
            seed: Some(9),
        };
        let expected = SamplingParams {
            temperature: 1.25,
            top_k: 7,
            top_p: 0.75,
            min_p: 0.125,
            repeat_penalty: 1.0,
            presence_penalty: -2.0,
            frequency_penalty: 2.0,
            penalty_last_n: usize::MAX,
            logit_bias: vec![(TokenId(3), f32::NEG_INFINITY)],
            seed: Some(9),
        };
        assert_eq!(resolve(user, &all_file_values()).unwrap(), expected);
    }

    #[test]
    fn minus_one_in_a_file_means_no_limit() {
        let entries = metadata([
            ("general.sampling.top_k", Value::Signed(-1)),
            ("general.sampling.penalty_last_n", Value::Signed(-1)),
        ]);
        let params = resolve(SamplingOverrides::default(), &entries).unwrap();
        assert_eq!((params.top_k, params.penalty_last_n), (0, usize::MAX));
    }

    #[test]
    fn a_senseless_value_in_a_file_is_an_error_that_names_it() {
        let message = |key, value| {
            let result = resolve(SamplingOverrides::default(), &metadata([(key, value)]));
            result.expect_err(key).to_string()
        };
        assert_eq!(
            message("general.sampling.temp", Value::Float(-1.0)),
            "model.gguf: general.sampling.temp is -1, but must be a finite number of at least 0; \
             set temperature yourself to override it"
        );
        assert_eq!(
            message("general.sampling.top_k", Value::Signed(-2)),
            "model.gguf: general.sampling.top_k is -2, but must be an integer of at least -1; \
             set top_k yourself to override it"
        );
        assert!(
            message("general.sampling.top_k", Value::Float(40.0)).contains("top_k is 40, but must be an int")
        );
        assert!(message("general.sampling.top_p", Value::Float(f64::NAN)).contains("top_p is NaN"));
        assert!(message("general.sampling.min_p", Value::String("0.1".into())).contains("min_p is text"));
        assert!(message("general.sampling.temp", Value::Bool(true)).contains("temp is true"));
        // Finite as an f64, but not as an f32.
        assert!(message("general.sampling.temp", Value::Float(1e300)).contains("must be a finite number"));
        assert!(message("general.sampling.penalty_repeat", Value::Float(0.0)).contains("repeat is 0, but"));
        assert!(message("general.sampling.penalty_last_n", Value::Signed(i64::MIN)).contains("at least -1"));
    }

    #[test]
    fn a_senseless_value_in_a_file_does_no_harm_once_overruled() {
        let entries = metadata([
            ("general.sampling.temp", Value::Float(f64::NAN)),
            ("general.sampling.top_k", Value::Signed(-9)),
        ]);
        let user = SamplingOverrides { temperature: Some(1.0), top_k: Some(5), ..Default::default() };
        assert!(resolve(user, &entries).is_ok());
    }

    #[test]
    fn the_user_is_told_which_value_is_out_of_range() {
        type Set = fn(&mut SamplingParams, f32);
        let table: [(&str, Set, &[f32], &[f32]); 6] = [
            ("temperature", |p, v| p.temperature = v, &[0.0, f32::MAX], &[-0.1, f32::INFINITY]),
            ("top_p", |p, v| p.top_p = v, &[0.0, 1.0], &[-0.1, 1.1]),
            ("min_p", |p, v| p.min_p = v, &[0.0, 1.0], &[-0.1, 1.1]),
            ("repeat_penalty", |p, v| p.repeat_penalty = v, &[0.1, 9.0], &[0.0, -1.0, f32::INFINITY]),
            ("presence_penalty", |p, v| p.presence_penalty = v, &[-2.0, 2.0], &[-2.1, 2.1]),
            ("frequency_penalty", |p, v| p.frequency_penalty = v, &[-2.0, 2.0], &[-2.1, 2.1]),
        ];
        for (name, set, good, bad) in table {
            let check = |&value| {
                let mut params = SamplingParams::default();
                set(&mut params, value);
                params.validate()
            };
            for value in good {
                assert!(check(value).is_ok(), "{name} of {value}");
            }
            for value in bad.iter().chain(&[f32::NAN, f32::NEG_INFINITY]) {
                let message = check(value).expect_err(name).to_string();
                assert!(message.starts_with(&format!("{name} is {value}, but must be ")), "{message}");
            }
        }
    }

    #[test]
    fn a_bias_may_forbid_but_not_force() {
        let with = |bias| SamplingParams { logit_bias: vec![(TokenId(5), bias)], ..Default::default() };
        assert!(with(f32::NEG_INFINITY).validate().is_ok());
        assert_eq!(
            with(f32::INFINITY).validate().unwrap_err().to_string(),
            "logit_bias of token 5 is inf, but must be a finite number or minus infinity"
        );
        assert!(with(f32::NAN).validate().is_err());
    }
}
