//! No setting of a GGUF file is ignored silently: every setting that converters write is computed, refused by name, or
//! in the list of those that do not take part in the arithmetic of text.

use std::path::Path;

use forebay_engine::internals::format::{Metadata, ModelFile, NumberArray, NumberKind, Value};
use forebay_engine::internals::models::{describe, unread};
use forebay_engine::{Error, Precision, TokenId};

use crate::common::gguf_builder::GgufBuilder;
use crate::common::models::{DENSE, MIXTURES, containers, data, logits, options, random_tokens};

/// A setting without the name of the architecture, and the type of its value.
struct Setting {
    key: String,
    kind: String,
}

/// What tools/gguf_keys.py found in llama.cpp.
fn settings() -> Vec<Setting> {
    let text = std::fs::read_to_string(data("gguf_keys.txt")).unwrap();
    let settings = text.lines().map(|line| {
        let (key, kind) = line.split_once(' ').unwrap();
        Setting { key: key.into(), kind: kind.into() }
    });
    settings.collect()
}

impl Setting {
    /// Values other than `now`, of which at least one changes what the setting does.
    fn others(&self, now: Option<&Value>) -> Vec<Value> {
        let bools = |bytes: &[u8]| Value::Numbers(NumberArray::new(NumberKind::Bool, bytes.into()));
        let values = match &*self.kind {
            "u32" => [3, 5, 4096].map(Value::Unsigned).into(),
            "f32" => [0.375, 300.0].map(Value::Float).into(),
            "bool" => vec![Value::Bool(false), Value::Bool(true)],
            "str" => vec![Value::String("other".into())],
            "bool[]" => vec![bools(&[1, 0, 1, 1])],
            "u32[]" | "f32[]" => vec![Value::Numbers(NumberArray::new(NumberKind::U8, vec![1, 0, 2, 3]))],
            other => panic!("{other}"),
        };
        values.into_iter().filter(|value| Some(value) != now).collect()
    }
}

/// The metadata with other values of some settings.
fn with(metadata: &Metadata, changes: &[(&str, &Value)]) -> Metadata {
    let mut changed = Metadata::default();
    let kept = metadata.iter().filter(|(name, _)| changes.iter().all(|(other, _)| name != other));
    for (name, value) in kept.chain(changes.iter().copied()) {
        changed.insert(name.into(), value.clone()).unwrap();
    }
    changed
}

/// One tiny model, whose settings are changed.
struct Subject {
    file: ModelFile,
    builder: GgufBuilder,
    tokens: Vec<TokenId>,
    folder: tempfile::TempDir,
}

impl Subject {
    fn new(path: &Path) -> Subject {
        let folder = tempfile::tempdir().unwrap();
        let file = ModelFile::open(path).unwrap();
        let vocabulary = file.tensor("token_embd.weight").unwrap().shape[0] as u32;
        let tokens = random_tokens(24, vocabulary, 1);
        let mut subject = Subject { file, builder: GgufBuilder::copy_of(path), tokens, folder };
        // These two have no effect without each other.
        let [scale, length] =
            ["scale", "length"].map(|key| subject.name(&format!("attention.temperature_{key}")));
        let sharpened =
            with(&subject.file.metadata, &[(&scale, &Value::Float(0.5)), (&length, &Value::Unsigned(8))]);
        if subject.refusal(sharpened.clone()).is_none() {
            subject.file.metadata = sharpened;
        }
        subject
    }

    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.file.architecture().unwrap())
    }

    /// The error for a model with these settings, if there is one.
    fn refusal(&mut self, metadata: Metadata) -> Option<Error> {
        let own = std::mem::replace(&mut self.file.metadata, metadata);
        let described = describe(&self.file);
        self.file.metadata = own;
        described.err()
    }

    fn logits(&self, metadata: &Metadata) -> Vec<f32> {
        let path = self.folder.path().join("changed.gguf");
        std::fs::write(&path, self.builder.clone().with_metadata(metadata).build()).unwrap();
        logits(&path, &options(Precision::Exact), &self.tokens)
    }

    /// Those of these settings whose values have no effect.
    fn silent(&mut self, base: &Metadata, settings: &[&Setting]) -> Vec<String> {
        let expected = self.logits(base);
        let mut silent = Vec::new();
        for setting in settings {
            let name = self.name(&setting.key);
            let now = base.get(&name);
            let acts = setting.others(now).iter().any(|value| {
                let changed = with(base, &[(&name, value)]);
                match self.refusal(changed.clone()) {
                    // Something else does not fit this value: a tensor, or another setting.
                    Some(Error::Format { .. }) => true,
                    Some(error) => ["tensor", &name].iter().any(|word| error.to_string().contains(word)),
                    None => self.logits(&changed) != expected,
                }
            });
            if !acts {
                silent.push(name);
            }
        }
        silent
    }
}

fn subjects() -> impl Iterator<Item = Subject> {
    MIXTURES.iter().chain(DENSE).copied().map(|family| Subject::new(&containers(family)[0]))
}

#[test]
fn every_setting_is_computed_or_refused_or_listed_as_harmless() {
    let settings = settings();
    assert!(settings.len() > 150);
    let mut silent = Vec::new();
    for mut subject in subjects() {
        let base = subject.file.metadata.clone();
        let arch = subject.file.architecture().unwrap().to_owned();
        let has_window = base.get(&subject.name("attention.sliding_window")).is_some();
        let harmless = |key: &str| match key {
            // A limit, unless YaRN computes with it.
            "context_length" => true,
            "attention.sliding_window_pattern" => !has_window,
            _ => unread::is_ignored(&arch, key),
        };
        let matter: Vec<_> = settings.iter().filter(|setting| !harmless(&setting.key)).collect();
        silent.extend(subject.silent(&base, &matter));
    }
    assert_eq!(silent, NONE);
}

#[test]
fn every_detail_of_yarn_is_computed_or_refused() {
    let settings = settings();
    let details = settings.iter().filter(|setting| setting.key.starts_with("rope.scaling."));
    let details: Vec<_> = details.filter(|setting| setting.key != "rope.scaling.finetuned").collect();
    let mut silent = Vec::new();
    for mut subject in subjects() {
        // Without a rotation, none of them matters.
        if unread::is_ignored(subject.file.architecture().unwrap(), "rope.freq_base") {
            continue;
        }
        let [kind, factor, original] = ["type", "factor", "original_context_length"]
            .map(|key| subject.name(&format!("rope.scaling.{key}")));
        let base = with(
            &subject.file.metadata,
            &[
                (&kind, &Value::String("yarn".into())),
                (&factor, &Value::Float(4.0)),
                (&original, &Value::Unsigned(1024)),
            ],
        );
        silent.extend(subject.silent(&base, &details));
    }
    assert_eq!(silent, NONE);
}

/// Settings that change nothing, in files of older converters and of other programs.
#[test]
fn settings_that_change_nothing_are_accepted() {
    use Value::{Bool, Float, Unsigned};
    let bools = |bytes: &[u8]| Value::Numbers(NumberArray::new(NumberKind::Bool, bytes.into()));
    let common = [
        ("vocab_size", Unsigned(7)),
        ("tensor_data_layout", Value::String("Meta AI original pth".into())),
        ("pooling_type", Unsigned(3)),
        ("rope.scale_linear", Float(1.0)),
        ("rope.scaling.finetuned", Bool(true)),
        ("rope.scaling.attn_factor", Float(1.0)),
        ("rope.freq_base_swa", Float(10_000.0)),
        ("rope.mrope_interleaved", Bool(true)),
        ("attention.causal", Bool(true)),
        ("attention.layer_norm_epsilon", Float(1e-5)),
        ("attention.clamp_kqv", Float(0.0)),
        ("attention.rope_pattern", bools(&[1, 1, 1, 1])),
        ("attention.scale", Float(0.0)),
        ("residual_scale", Float(1.0)),
        ("swiglu_clamp_exp", bools(&[0, 0, 0, 0])),
        ("use_parallel_residual", Bool(false)),
        ("vision.block_count", Unsigned(27)),
        ("vision.image_mean", Float(0.5)),
    ];
    let of_families = [
        ("qwen3moe", "norm_top_k_prob", Bool(true)),
        ("qwen3moe", "expert_group_used_count", Unsigned(1)),
        ("qwen3moe", "expert_gating_func", Unsigned(1)),
        ("qwen3moe", "expert_weights_scale", Float(1.0)),
        ("qwen3moe", "attention.sliding_window", Unsigned(1 << 30)),
        ("qwen35moe", "ssm.v_head_reordered", Bool(true)),
        ("llama", "attention.head_dim", Unsigned(16)),
    ];
    for mut subject in subjects() {
        // The file's own settings precede.
        let base = subject.file.metadata.clone();
        let named = common.iter().map(|(key, value)| (subject.name(key), value));
        let new: Vec<_> = named.filter(|(name, _)| base.get(name).is_none()).collect();
        let new: Vec<_> = new.iter().map(|(name, value)| (&**name, *value)).collect();
        let base_of_window = subject.name("rope.freq_base");
        let settings = with(&base, &[&new[..], &[(&base_of_window, &Float(10_000.0))]].concat());
        assert!(subject.refusal(settings).is_none(), "{:?}", subject.file.path());
    }
    for (family, key, value) in of_families {
        let mut subject = Subject::new(&containers(family)[0]);
        let settings = with(&subject.file.metadata, &[(&subject.name(key), &value)]);
        let refusal = subject.refusal(settings).map(|error| error.to_string());
        assert_eq!(refusal, None, "{family}: {key}");
    }
}

#[test]
fn an_unknown_setting_is_called_unknown() {
    let mut subject = Subject::new(&containers("qwen3moe")[0]);
    let settings = with(&subject.file.metadata, &[("qwen3moe.gravity", &Value::Float(9.5))]);
    let refusal = subject.refusal(settings).unwrap();
    assert!(matches!(refusal, Error::Unsupported(_)), "{refusal}");
    for part in ["qwen3moe.gguf", "qwen3moe.gravity", "\"9.5\"", "unknown"] {
        assert!(refusal.to_string().contains(part), "{part}: {refusal}");
    }
    // Other prefixes belong to other parts of the file.
    let settings = with(&subject.file.metadata, &[("qwen3.gravity", &Value::Float(9.5))]);
    assert!(subject.refusal(settings).is_none());
}

const NONE: [String; 0] = [];
