//! The settings of one model: those of its family's shape, with changes.

use super::Shape;
use super::families::Family;
use crate::error::{Error, Result};
use crate::format::{Metadata, NumberArray, NumberKind, Value};

/// The settings of one model, in order; the keys are without the family's name.
pub(super) struct Settings {
    family: &'static Family,
    values: Vec<(String, Value)>,
}

/// A setting that replaces the family's: `KEY=VALUE`.
#[derive(Clone)]
pub struct Change {
    key: String,
    value: Value,
}

impl std::str::FromStr for Change {
    type Err = Error;

    fn from_str(s: &str) -> Result<Change> {
        let (key, value) = s
            .split_once('=')
            .filter(|(key, value)| !key.is_empty() && !value.is_empty())
            .ok_or_else(|| Error::Invalid("expected KEY=VALUE, such as attention.kv_lora_rank=512".into()))?;
        let value = if let Ok(number) = value.parse() {
            Value::Unsigned(number)
        } else if let Ok(number) = value.parse() {
            Value::Float(number)
        } else if let Ok(truth) = value.parse() {
            Value::Bool(truth)
        } else if let Ok(numbers) = value.split(',').map(str::parse::<i32>).collect::<Result<Vec<_>, _>>() {
            let bytes = numbers.into_iter().flat_map(i32::to_le_bytes).collect();
            Value::Numbers(NumberArray::new(NumberKind::I32, bytes))
        } else {
            Value::String(value.to_owned())
        };
        Ok(Change { key: key.to_owned(), value })
    }
}

impl Settings {
    /// The family's settings with these changes.
    pub fn new(family: &'static Family, shape: &Shape, changes: &[Change]) -> Result<Settings> {
        let mut settings = Settings { family, values: Vec::new() };
        for setting in family.settings.split_whitespace() {
            settings.set(&setting.parse()?);
        }
        settings.reshape(shape)?;
        changes.iter().for_each(|change| settings.set(change));
        Ok(settings)
    }

    /// Applies the changes of a shape.
    fn reshape(&mut self, shape: &Shape) -> Result<()> {
        let latent = self.get("attention.kv_lora_rank").is_some();
        // In models with experts, `inter` is their width. If the file has the same number for dense layers, it
        // changes both.
        let [dense, experts] =
            ["feed_forward_length", "expert_feed_forward_length"].map(|key| self.count(key));
        let of_experts = shape.inter.filter(|_| experts.is_some());
        let of_all = shape.inter.filter(|_| experts.is_none() || experts == dense);
        // The rotated share of a head stays the same.
        let rotated =
            match (shape.head_dim, self.count("rope.dimension_count"), self.count("attention.key_length")) {
                (Some(head), Some(rotated), Some(key)) => Some(head * rotated / key),
                _ => None,
            };
        let fields = [
            ("layers", shape.layers, "block_count"),
            ("hidden", shape.hidden, "embedding_length"),
            ("heads", shape.heads, "attention.head_count"),
            ("kv-heads", shape.kv_heads, "attention.head_count_kv"),
            ("head-dim", shape.head_dim, "attention.key_length"),
            ("head-dim", shape.head_dim, "attention.value_length"),
            ("head-dim", rotated, "rope.dimension_count"),
            ("experts", shape.experts, "expert_count"),
            ("top-k", shape.top_k, "expert_used_count"),
            ("inter", of_experts, "expert_feed_forward_length"),
            ("inter", of_all, "feed_forward_length"),
            ("ctx", shape.ctx, "context_length"),
        ];
        for (field, value, key) in fields {
            let Some(value) = value else { continue };
            let known = self.get(key).is_some() || self.family.if_given.contains(&key);
            if !known || latent && matches!(field, "kv-heads" | "head-dim") {
                let name = self.family.name;
                return Err(Error::Invalid(format!(
                    "{field} does not apply to the family {name}; change its settings by their GGUF keys instead"
                )));
            }
            self.set(&Change { key: key.to_owned(), value: Value::Unsigned(value) });
        }
        Ok(())
    }

    fn set(&mut self, change: &Change) {
        let Change { key, value } = change.clone();
        match self.values.iter_mut().find(|(known, _)| *known == key) {
            // An integer may be meant as a float.
            Some((_, Value::Float(known))) if value.as_f64().is_some() => {
                *known = value.as_f64().unwrap_or(*known);
            }
            Some((_, known)) => *known = value,
            None => self.values.push((key, value)),
        }
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.values.iter().find(|(known, _)| known == key).map(|(_, value)| value)
    }

    /// An integer setting.
    pub fn count(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_u64()
    }

    /// Whether the model has this optional tensor.
    pub fn has_optional(&self, name: &str) -> bool {
        let (layer, rest) = match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, rest)) => (layer.parse::<u64>().ok(), rest),
            None => (None, name),
        };
        let fits = match (rest, layer, self.count("full_attention_interval")) {
            ("exp_probs_b.bias", ..) => self.count("expert_gating_func") == Some(2),
            // Where routers are optional, the layers without them are dense.
            ("ffn_gate_inp.weight", Some(layer), _) => self.has_mixture(layer),
            // Only layers with a window have values that are not keys.
            ("attn_v.weight", Some(layer), _) => self.has_window(layer),
            // Only layers with linear attention have filters.
            ("ssm_conv1d.weight", Some(layer), Some(interval @ 1..)) => !(layer + 1).is_multiple_of(interval),
            _ => true,
        };
        fits && self.family.optional.contains(&rest)
    }

    /// Whether a layer has experts.
    fn has_mixture(&self, layer: u64) -> bool {
        let dense = self.count("leading_dense_block_count").unwrap_or(0);
        let step = self.count("interleave_moe_layer_step").unwrap_or(1).max(1);
        layer >= dense && (layer + 1).is_multiple_of(step)
    }

    /// Whether a layer has a window, by the list of layers.
    fn has_window(&self, layer: u64) -> bool {
        let pattern = self.get("attention.sliding_window_pattern").and_then(Value::as_numbers);
        let windowed = pattern.and_then(|pattern| pattern.iter().nth(layer as usize)?.as_f64());
        windowed.is_none_or(|windowed| windowed != 0.0)
    }

    /// The settings as metadata of a file.
    pub fn metadata(&self) -> Metadata {
        let name = self.family.name;
        let mut metadata = Metadata::default();
        let mut insert = |key: String, value: Value| {
            // Keys are distinct here; of duplicates the first would win.
            let _ = metadata.insert(key, value);
        };
        insert("general.architecture".into(), Value::String(name.into()));
        for (key, value) in &self.values {
            insert(format!("{name}.{key}"), value.clone());
        }
        metadata
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{self, ARCHS};
    use crate::synth::families::FAMILIES;

    #[test]
    fn every_family_of_the_registry_has_a_shape() {
        for arch in ARCHS {
            assert!(FAMILIES.iter().any(|family| family.name == arch.gguf), "{}", arch.gguf);
        }
        assert_eq!(FAMILIES.len(), ARCHS.len());
    }

    #[test]
    fn the_shapes_are_those_of_the_models() {
        // Billions of weights without the vocabulary's, by the publishers' numbers or the sum of their files.
        let sizes = [
            ("qwen3moe", 29.9),
            ("qwen2", 6.5),
            ("qwen3", 6.95),
            ("llama", 6.98),
            ("olmoe", 6.7),
            ("qwen2moe", 13.7),
            ("minimax-m2", 228.0),
            ("glm4moe", 105.6),
            ("qwen35moe", 34.0),
            ("qwen3next", 79.0),
            ("gpt-oss", 19.7),
            ("deepseek2", 15.3),
            ("dots1", 141.5),
            ("hy_v3", 294.5),
            ("exaone-moe", 234.5),
            ("afmoe", 25.4),
            ("ernie4_5-moe", 21.6),
            ("hunyuan-moe", 79.9),
            ("mistral3", 7.4),
            ("mistral4", 118.0),
            ("qwen35", 6.93),
            ("qwen3vlmoe", 29.9),
            ("gemma4", 24.5),
            ("gemma3", 10.8),
            ("cohere2moe", 217.2),
            ("phimoe", 41.7),
            ("lfm2moe", 8.2),
            ("granitemoe", 3.22),
            ("granite", 7.97),
            ("bailingmoe", 16.3),
            ("bailingmoe2", 15.6),
            ("step35", 195.9),
            ("mimo2", 307.6),
            ("laguna", 33.0),
            ("llama4", 105.7),
            ("smallthinker", 20.7),
            ("grovemoe", 32.4),
            // Without the layers that are not supported.
            ("nemotron_h_moe", 115.1),
        ];
        for (name, size) in sizes {
            let family = FAMILIES.iter().find(|family| family.name == name).unwrap();
            let settings = Settings::new(family, &Shape::default(), &[]).unwrap();
            let metadata = settings.metadata();
            let needs = models::needs("x".as_ref(), metadata, 1000, &|n| settings.has_optional(n)).unwrap();
            let count: f64 = needs.iter().map(|n| n.shape.iter().map(|&d| d as f64).product::<f64>()).sum();
            assert!((count / 1e9 / size - 1.0).abs() < 0.03, "{}: {}", family.name, count / 1e9);
        }
    }

    #[test]
    fn flags_and_settings_change_the_shape() {
        let family = FAMILIES.iter().find(|family| family.name == "minimax-m2").unwrap();
        let shape = Shape { head_dim: Some(32), inter: Some(64), ..Shape::default() };
        let changes = ["rope.freq_base=7".parse().unwrap(), "new.key=yes".parse().unwrap()];
        let settings = Settings::new(family, &shape, &changes).unwrap();
        assert_eq!(settings.count("rope.dimension_count"), Some(16));
        for key in ["feed_forward_length", "expert_feed_forward_length"] {
            assert_eq!(settings.count(key), Some(64));
        }
        assert_eq!(settings.get("rope.freq_base"), Some(&Value::Float(7.0)));
        assert_eq!(settings.get("new.key"), Some(&Value::String("yes".into())));
        let shape = Shape { experts: Some(3), ..Shape::default() };
        let dense = FAMILIES.iter().find(|family| family.name == "qwen3").unwrap();
        let Err(error) = Settings::new(dense, &shape, &[]) else {
            panic!("experts of a dense family are refused")
        };
        assert!(error.to_string().contains("experts"), "{error}");
    }
}
