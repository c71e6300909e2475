//! Which tensors of a folder belong to the text model, if the model has vision or audio, too.

use std::collections::HashSet;

use crate::format::{Format, ModelFile, nesting};

/// The text model of a checkpoint: what stands in front of the names of its tensors.
pub(super) struct TextModel<'a> {
    /// The roots of the names that the family has declared; see [`root`].
    roots: HashSet<&'a str>,
    /// Whether the checkpoint has more than the text model.
    has_other_parts: bool,
}

impl<'a> TextModel<'a> {
    /// The text model in `file`, of which the family has `declared` tensors.
    pub(super) fn of(file: &ModelFile, declared: &HashSet<&'a str>) -> TextModel<'a> {
        const SETTINGS: [&str; 2] = ["vision_config.", "audio_config."];
        let has_settings =
            || file.metadata.iter().any(|(key, _)| SETTINGS.iter().any(|part| key.starts_with(part)));
        let is_nested = || file.tensors.iter().any(|tensor| nesting(&tensor.name).is_some());
        TextModel {
            roots: declared.iter().map(|name| root(name)).collect(),
            has_other_parts: file.format != Format::Gguf && (is_nested() || has_settings()),
        }
    }

    /// Whether a tensor that the family has not declared belongs to another part, such as a vision tower or a
    /// projector. Inside the text model every tensor must be known.
    pub(super) fn excludes(&self, name: &str) -> bool {
        self.has_other_parts && (!self.roots.contains(root(name)) || is_sense(name))
    }
}

/// What tells the parts of a checkpoint apart: the text model's prefix, or a name up to its first dot.
fn root(name: &str) -> &str {
    nesting(name).unwrap_or_else(|| name.split_once('.').map_or(name, |(first, _)| first))
}

/// Whether a tensor beside the text model's, as in `model.visual.…` and `model.layers.…`, belongs to an encoder or
/// projector of images or audio by its name.
fn is_sense(name: &str) -> bool {
    const SENSES: [&str; 8] =
        ["visual", "vision", "image", "audio", "embed_vision", "embed_audio", "mm_projector", "multi_modal"];
    let part = name.strip_prefix("model.").filter(|_| nesting(name).is_none());
    part.is_some_and(|part| SENSES.iter().any(|sense| part.starts_with(sense)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use forebay_testing::shared;
    use serde_json::{Value, json};

    use super::*;

    /// A folder with these settings and tensors.
    fn folder(path: &Path, settings: &Value, names: &[&str]) -> ModelFile {
        let tensor = json!({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]});
        let mut at = 0;
        let tensors = names.iter().map(|name| {
            let mut tensor = tensor.clone();
            tensor["data_offsets"] = json!([at, at + 4]);
            at += 4;
            ((*name).to_owned(), tensor)
        });
        let header = Value::Object(tensors.collect()).to_string();
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; at]].concat();
        std::fs::write(path.join("model.safetensors"), bytes).unwrap();
        std::fs::write(path.join("config.json"), settings.to_string()).unwrap();
        ModelFile::open(path).unwrap()
    }

    /// Whether a checkpoint with these `settings`, of whose text model `declared` is known, may have `other`.
    fn excludes(settings: &Value, declared: &[&str], other: &str) -> bool {
        let temporary = tempfile::tempdir().unwrap();
        let file = folder(temporary.path(), settings, &[declared, &[other]].concat());
        TextModel::of(&file, &declared.iter().copied().collect()).excludes(other)
    }

    #[test]
    fn everything_outside_a_nested_text_model_is_another_part() {
        for (prefix, head) in
            [("model.language_model.", "lm_head"), ("language_model.model.", "language_model.lm_head")]
        {
            let declared = [format!("{prefix}layers.0.mlp.weight"), format!("{head}.weight")];
            let declared = declared.each_ref().map(String::as_str);
            for other in [
                "vision_tower.blocks.0.weight",
                "multi_modal_projector.linear_1.weight",
                "patch_merge_mlp.linear_1.weight",
                "model.visual.patch_embed.weight",
                "model.embed_audio.embedding.weight",
                "aligner.weight",
                "image_newline",
            ] {
                assert!(excludes(&json!({}), &declared, other), "{other}");
            }
            assert!(!excludes(&json!({}), &declared, &format!("{prefix}layers.0.mlp.gate")));
            assert!(!excludes(&json!({}), &declared, &format!("{head}.bias")));
        }
    }

    #[test]
    fn settings_of_vision_tell_that_there_are_parts_beside_the_text_model() {
        let declared = ["model.layers.0.mlp.weight", "lm_head.weight"];
        let settings = json!({"vision_config": {"depth": 2}});
        for other in
            ["vision_model.conv1.weight", "vit_large_projector.weight", "model.vision_tower.x.weight"]
        {
            assert!(excludes(&settings, &declared, other), "{other}");
            assert!(!excludes(&json!({}), &declared, other), "{other} of a model without vision");
        }
        for unknown in ["model.layers.0.mlp.gate", "model.gate.weight", "lm_head.bias"] {
            assert!(!excludes(&settings, &declared, unknown), "{unknown}");
        }
    }

    #[test]
    fn the_roots_of_unusual_names_are_the_family_s() {
        let settings = json!({"audio_config": {"depth": 2}});
        let declared = ["layers.0.ffn.weight", "embed.weight", "norm.weight"];
        assert!(excludes(&settings, &declared, "audio_tower.conv1.weight"));
        assert!(!excludes(&settings, &declared, "layers.0.unknown.weight"));
    }

    /// Each tiny model was published with its vision tower or a stand-in for it.
    #[test]
    fn vision_is_told_apart_in_tiny_models() {
        for name in ["qwen3_vl_moe", "mistral4", "minimax_m3", "step3p5", "glm5_next"] {
            let Some(path) = shared(&format!("golden2/{name}")) else { return };
            let file = ModelFile::open(&path).unwrap();
            let is_text = |name: &&str| {
                nesting(name).is_some() || name.starts_with("lm_head.") || name.starts_with("model.layers.")
            };
            let names: Vec<_> = file.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
            let declared: HashSet<&str> = names.iter().copied().filter(is_text).collect();
            let text_model = TextModel::of(&file, &declared);
            let vision = names.iter().filter(|name| text_model.excludes(name)).count();
            assert!(vision > 10, "{name}: {vision}");
            for of_text in names.iter().filter(|name| is_text(name)) {
                assert!(!text_model.excludes(of_text), "{name}: {of_text}");
            }
            let rest = names.iter().filter(|name| !is_text(name) && !text_model.excludes(name));
            // A text model at the top has these two beside its layers.
            assert!(
                rest.clone().all(|name| ["model.embed_tokens.weight", "model.norm.weight"].contains(name)),
                "{name}"
            );
        }
    }
}
