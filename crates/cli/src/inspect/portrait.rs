//! Describes a model: one sentence, and the sizes of its parts.

use forebay_engine::internals::format::{ModelFile, Value};
use forebay_engine::{Bytes, Options, Prospect};
use serde_json::{Value as Json, json};

use super::{Summary, parameters_text};

/// The role of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Embeddings,
    Attention,
    Router,
    Experts,
    SharedExperts,
    FeedForward,
    Output,
    Rest,
}

impl Role {
    const ALL: [Role; 8] = [
        Role::Embeddings,
        Role::Attention,
        Role::Router,
        Role::Experts,
        Role::SharedExperts,
        Role::FeedForward,
        Role::Output,
        Role::Rest,
    ];

    fn name(self) -> &'static str {
        match self {
            Role::Embeddings => "embeddings",
            Role::Attention => "attention",
            Role::Router => "routers",
            Role::Experts => "experts",
            Role::SharedExperts => "shared experts",
            Role::FeedForward => "feed-forward",
            Role::Output => "output",
            Role::Rest => "norms and rest",
        }
    }

    /// The role of a tensor by its name in GGUF files or folders.
    fn of(tensor: &str) -> Role {
        let has = |parts: &[&str]| parts.iter().any(|part| tensor.contains(part));
        if has(&["norm"]) {
            Role::Rest
        } else if has(&["shexp", "shared_expert"]) {
            Role::SharedExperts
        } else if has(&["_exps", ".experts."]) {
            Role::Experts
        } else if has(&["ffn_gate_inp", "exp_probs_b", "mlp.gate.", "moe.gate.", "mlp.router."]) {
            Role::Router
        } else if has(&["token_embd", "embed_tokens"]) {
            Role::Embeddings
        } else if tensor.starts_with("output.") || has(&["lm_head"]) {
            Role::Output
        } else if has(&["attn", "ssm_"]) {
            Role::Attention
        } else if has(&["ffn_", "mlp."]) {
            Role::FeedForward
        } else {
            Role::Rest
        }
    }
}

/// The tensors of a role: their bytes by type, largest first.
struct Size {
    role: Role,
    bytes: u64,
    tensors: usize,
    types: Vec<(&'static str, u64)>,
}

/// What the model needs to run.
struct Needs {
    bytes_per_token: u64,
    dense_per_token: u64,
    experts_per_token: u64,
    least_memory: u64,
    memory_for_all: u64,
    vocabulary: usize,
}

/// The description of a model besides its metadata.
pub struct Portrait {
    sentence: String,
    sizes: Vec<Size>,
    tokenizer: Option<String>,
    template: Option<bool>,
    /// What it needs to run, or why it cannot run; `None` without weights.
    needs: Option<Result<Needs, String>>,
}

impl Portrait {
    pub fn new(file: &ModelFile) -> Portrait {
        let needs = has_weights(file).then(|| Needs::of(file).map_err(|error| error.to_string()));
        let template = match file.folder() {
            None => Some(file.metadata.str("tokenizer.chat_template").is_some()),
            // In folders it is in one of several files, which are read only when the model is opened.
            Some(_) => None,
        };
        Portrait { sentence: sentence(file), sizes: sizes(file), tokenizer: tokenizer(file), template, needs }
    }

    /// The sentence before the rows of a summary.
    pub fn sentence(&self) -> &str {
        &self.sentence
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        let mut row = |name: &str, value: String| text += &format!("{name:<15}{value}\n");
        if let Some(tokenizer) = &self.tokenizer {
            row("tokenizer", tokenizer.clone());
        }
        if let Some(template) = self.template {
            row(
                "chat template",
                if template {
                    "included"
                } else {
                    "none: the model continues texts; chats need --chat-template-file"
                }
                .into(),
            );
        }
        match &self.needs {
            None => {}
            Some(Err(reason)) => row("cannot run", reason.clone()),
            Some(Ok(needs)) => {
                let [all, dense, experts] =
                    [needs.bytes_per_token, needs.dense_per_token, needs.experts_per_token].map(Bytes);
                row("per token", format!("reads {all}: dense weights {dense}, experts {experts}"));
                row(
                    "least memory",
                    format!("{}, with experts read from the drive", Bytes(needs.least_memory)),
                );
                row("all in memory", Bytes(needs.memory_for_all).to_string());
            }
        }
        if !self.sizes.is_empty() {
            text += "\nsizes\n";
            for Size { role, bytes, tensors, types } in &self.sizes {
                let types: Vec<_> =
                    types.iter().map(|(name, bytes)| format!("{name} {}", Bytes(*bytes))).collect();
                let size = Bytes(*bytes).to_string();
                text +=
                    &format!("  {:<16}{size:>11}  {tensors:>5} tensors  {}\n", role.name(), types.join(", "));
            }
        }
        text
    }

    /// Adds the description to the object of a summary.
    pub fn add_to(&self, object: &mut Json) {
        let roles = self.sizes.iter().map(|size| {
            let types: serde_json::Map<_, _> =
                size.types.iter().map(|(name, bytes)| ((*name).to_owned(), json!(bytes))).collect();
            json!({ "role": size.role.name(), "bytes": size.bytes, "tensors": size.tensors, "types": types })
        });
        object["description"] = json!(self.sentence);
        object["roles"] = roles.collect();
        object["tokenizer"] = json!(self.tokenizer);
        object["chat_template"] = json!(self.template);
        let needs = self.needs.as_ref().and_then(|needs| needs.as_ref().ok());
        object["cannot_run"] = json!(self.needs.as_ref().and_then(|needs| needs.as_ref().err()));
        object["bytes_per_token"] = json!(needs.map(|n| n.bytes_per_token));
        object["least_memory"] = json!(needs.map(|n| n.least_memory));
        object["memory_for_all"] = json!(needs.map(|n| n.memory_for_all));
        object["vocabulary"] = json!(needs.map(|n| n.vocabulary));
    }
}

impl Needs {
    fn of(file: &ModelFile) -> forebay_engine::Result<Needs> {
        // The result does not depend on the memory of this machine.
        let options = Options::default().memory(u64::MAX);
        let prospect = Prospect::new(file.path(), &options)?;
        let traffic = prospect.traffic();
        Ok(Needs {
            bytes_per_token: traffic.bytes(1),
            dense_per_token: traffic.dense,
            experts_per_token: traffic.experts,
            least_memory: prospect.least_memory(&options)?,
            memory_for_all: prospect.memory_for_all(&options)?,
            vocabulary: prospect.tokenizer().vocab_size(),
        })
    }
}

fn has_weights(file: &ModelFile) -> bool {
    !file.tensors.is_empty() || !file.unknown.is_empty()
}

/// One sentence that says what the file is.
fn sentence(file: &ModelFile) -> String {
    let summary = Summary::new(file);
    let family = summary.architecture.unwrap_or("of an unknown architecture");
    if !has_weights(file) {
        return format!("A vocabulary for {family}: it has no weights.");
    }
    let kind = match summary.experts {
        Some(experts) if experts > 0 => "mixture of experts",
        _ => "dense model",
    };
    let mut text = format!("A {kind} ({family}) of {} parameters", parameters_text(summary.parameters));
    if let Some(layers) = summary.layers {
        text += &format!(" in {layers} layers");
    }
    if let (Some(experts @ 1..), Some(used)) = (summary.experts, summary.experts_used) {
        text += &format!(", with {experts} experts per layer, {used} used per token");
    }
    if let Some(context) = summary.context {
        text += &format!("; context up to {context} tokens");
    }
    text + "."
}

fn sizes(file: &ModelFile) -> Vec<Size> {
    let size = |role: Role| {
        let mut size = Size { role, bytes: 0, tensors: 0, types: Vec::new() };
        for tensor in file.tensors.iter().filter(|t| Role::of(&t.name) == role) {
            size.bytes += tensor.len;
            size.tensors += 1;
            let name = tensor.dtype.name();
            match size.types.iter_mut().find(|(known, _)| *known == name) {
                Some((_, bytes)) => *bytes += tensor.len,
                None => size.types.push((name, tensor.len)),
            }
        }
        size.types.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        size
    };
    Role::ALL.map(size).into_iter().filter(|size| size.tensors > 0).collect()
}

/// A description of the tokenizer, if the file has one.
fn tokenizer(file: &ModelFile) -> Option<String> {
    let kind = match file.metadata.str("tokenizer.ggml.model")? {
        "gpt2" => "byte-level BPE",
        "llama" => "SentencePiece",
        "bert" => "WordPiece",
        "t5" => "Unigram",
        other => other,
    };
    let mut text = kind.to_owned();
    if let Some(pre) = file.metadata.str("tokenizer.ggml.pre") {
        text += &format!(", pre-tokenizer {pre}");
    }
    if let Some(tokens) = file.metadata.get("tokenizer.ggml.tokens").and_then(Value::as_strings) {
        text += &format!(", {} tokens", tokens.len());
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_have_their_roles_under_both_kinds_of_names() {
        for (name, role) in [
            ("token_embd.weight", Role::Embeddings),
            ("model.embed_tokens.weight", Role::Embeddings),
            ("output.weight", Role::Output),
            ("lm_head.weight", Role::Output),
            ("output_norm.weight", Role::Rest),
            ("blk.0.attn_output.weight", Role::Attention),
            ("model.layers.3.self_attn.q_proj.weight", Role::Attention),
            ("model.layers.3.linear_attn.in_proj.weight", Role::Attention),
            ("blk.0.attn_norm.weight", Role::Rest),
            ("blk.0.ffn_gate_inp.weight", Role::Router),
            ("blk.0.exp_probs_b.bias", Role::Router),
            ("model.layers.0.mlp.gate.weight", Role::Router),
            ("model.layers.0.block_sparse_moe.gate.weight", Role::Router),
            ("blk.0.ffn_gate_exps.weight", Role::Experts),
            ("model.layers.0.mlp.experts.7.up_proj.weight", Role::Experts),
            ("blk.0.ffn_down_shexp.weight", Role::SharedExperts),
            ("model.layers.0.mlp.shared_experts.up_proj.weight", Role::SharedExperts),
            ("blk.0.ffn_down.weight", Role::FeedForward),
            ("model.layers.0.mlp.gate_proj.weight", Role::FeedForward),
        ] {
            assert_eq!(Role::of(name), role, "{name}");
        }
    }
}
