//! Qwen3-MoE: grouped-query attention with normed queries and keys, every layer a mixture of experts.

use forebay_kernels::RopePairs;

use super::{Arch, Builder, Config, ExpertNames, Model, Name, keys};
use crate::LayerIdx;
use crate::backend::{Buf, BufShape, ExpertBuffers, KvShape, Matrix, Rope, Router, Vector};
use crate::blocks::Context;
use crate::blocks::gqa::{Gqa, GqaWeights};
use crate::blocks::head::Head;
use crate::blocks::moe::{Gates, Moe};
use crate::blocks::rope::plain_frequencies;
use crate::error::Result;
use crate::format::Format;
use crate::session::Batch;

/// The family's entry in the registry.
pub const ARCH: Arch =
    Arch { gguf: "qwen3moe", hugging_face: &["Qwen3MoeForCausalLM", "qwen3_moe"], describe };

const EMBED: Name = Name::new("token_embd.weight", "model.embed_tokens.weight");
const NORM: Name = Name::new("output_norm.weight", "model.norm.weight");
const OUTPUT: Name = Name::new("output.weight", "lm_head.weight");
// Of every layer:
const ATTN_NORM: Name = Name::new("attn_norm.weight", "input_layernorm.weight");
const Q: Name = Name::new("attn_q.weight", "self_attn.q_proj.weight");
const K: Name = Name::new("attn_k.weight", "self_attn.k_proj.weight");
const V: Name = Name::new("attn_v.weight", "self_attn.v_proj.weight");
const ATTN_OUT: Name = Name::new("attn_output.weight", "self_attn.o_proj.weight");
const Q_NORM: Name = Name::new("attn_q_norm.weight", "self_attn.q_norm.weight");
const K_NORM: Name = Name::new("attn_k_norm.weight", "self_attn.k_norm.weight");
const FFN_NORM: Name = Name::new("ffn_norm.weight", "post_attention_layernorm.weight");
const ROUTER: Name = Name::new("ffn_gate_inp.weight", "mlp.gate.weight");

struct Qwen3Moe {
    embed: Matrix, // [vocab, hidden]
    eps: f32,
    layers: Vec<Layer>,
    attention: Gqa,
    moe: Moe,
    head: Head,
    x: Buf,      // [rows, hidden] the residual stream
    normed: Buf, // [rows, hidden] what a block reads
    added: Buf,  // [rows, hidden] what a block adds
}

struct Layer {
    attn_norm: Vector, // [hidden]
    attn: GqaWeights,
    ffn_norm: Vector, // [hidden]
    router: Matrix,   // [experts, hidden]
}

fn describe(config: &Config<'_>, b: &mut Builder<'_>) -> Result<Box<dyn Model>> {
    let layers = config.count(keys::LAYERS)?;
    let hidden = config.count(keys::HIDDEN)?;
    let heads = config.count(keys::HEADS)?;
    let kv_heads = config.optional_count(keys::KV_HEADS)?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        return Err(config.error(keys::KV_HEADS, "does not divide the number of heads"));
    }
    let key_dim = config.optional_count(keys::KEY_DIM)?.unwrap_or(hidden / heads);
    let value_dim = config.optional_count(keys::VALUE_DIM)?.unwrap_or(key_dim);
    if key_dim == 0 || !key_dim.is_multiple_of(2) {
        return Err(config.error(keys::KEY_DIM, "is not an even number of channels"));
    }
    let eps = config.float(keys::NORM_EPS)?;
    let rope_base = config.optional_float(keys::ROPE_BASE)?.unwrap_or(10_000.0);
    config.plain_rope()?;
    if let Some(channels) = config.optional_count(keys::ROPE_DIM)?.filter(|&n| n != key_dim) {
        return Err(config.unsupported(keys::ROPE_DIM, &channels.to_string()));
    }
    if let Some(share) = config.optional_float(keys::ROPE_SHARE)?.filter(|&share| share != 1.0) {
        return Err(config.unsupported(keys::ROPE_SHARE, &share.to_string()));
    }
    if let Some(other) = config.optional_text(keys::ACTIVATION)?.filter(|&name| name != "silu") {
        return Err(config.unsupported(keys::ACTIVATION, other));
    }
    if config.optional_bool(keys::SLIDING_WINDOW)? == Some(true) {
        return Err(config.unsupported(keys::SLIDING_WINDOW, "true"));
    }
    let experts = config.count(keys::EXPERTS)?;
    let top_k = config.count(keys::EXPERTS_USED)?;
    if top_k > experts {
        return Err(config.error(keys::EXPERTS_USED, "is larger than the number of experts"));
    }
    // GGUF files do not say: their weights are always made to sum to one.
    let normalise = match config.format() {
        Format::Gguf => true,
        Format::HuggingFace | Format::Mlx => config.optional_bool(keys::ROUTER_NORMALISES)?.unwrap_or(false),
    };
    let router = Router { experts, top_k, normalise };
    let inner = config.count(keys::EXPERT_INNER)?;
    let vocab = b.rows_of(EMBED)?;

    // The tensors come first: their shapes confirm the sizes that everything else is made by.
    let embed = b.table(EMBED, vocab, hidden)?;
    let layers = (0..layers)
        .map(|l| {
            b.experts(&ExpertNames::USUAL, &router, hidden, inner)?;
            Ok(Layer {
                attn_norm: b.vector(ATTN_NORM.of_layer(l), hidden)?,
                attn: GqaWeights {
                    q: b.matrix(Q.of_layer(l), heads * key_dim, hidden)?,
                    k: b.matrix(K.of_layer(l), kv_heads * key_dim, hidden)?,
                    v: b.matrix(V.of_layer(l), kv_heads * value_dim, hidden)?,
                    out: b.matrix(ATTN_OUT.of_layer(l), hidden, heads * value_dim)?,
                    q_norm: b.vector(Q_NORM.of_layer(l), key_dim)?,
                    k_norm: b.vector(K_NORM.of_layer(l), key_dim)?,
                },
                ffn_norm: b.vector(FFN_NORM.of_layer(l), hidden)?,
                router: b.matrix(ROUTER.of_layer(l), experts, hidden)?,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let norm = b.vector(NORM, hidden)?;
    // Without an output matrix of its own, a model uses the embedding for both, unless it says otherwise.
    let tied = !b.has(OUTPUT) && config.optional_bool(keys::TIED)? != Some(false);
    let output = if tied { embed } else { b.matrix(OUTPUT, vocab, hidden)? };

    let (x, normed, added) = (b.buffer(hidden), b.buffer(hidden), b.buffer(hidden));
    let attention = Gqa {
        kv: KvShape { heads: kv_heads, key_dim, value_dim },
        scale: 1.0 / (key_dim as f32).sqrt(),
        rope: Rope {
            frequencies: plain_frequencies(rope_base, key_dim),
            scale: 1.0,
            pairs: RopePairs::HalfSplit,
        },
        eps,
        q: b.buffer(heads * key_dim),
        k: b.buffer(kv_heads * key_dim),
        v: b.buffer(kv_heads * value_dim),
        attended: b.buffer(heads * value_dim),
        angles: b.buffer(key_dim),
    };
    let moe = Moe {
        router,
        logits: b.buffer(experts),
        buffers: ExpertBuffers {
            x: normed,
            gate: b.buffer(top_k * inner),
            up: b.buffer(top_k * inner),
            out: b.buffer(top_k * hidden),
        },
    };
    let head = Head {
        norm,
        eps,
        output,
        x,
        picked: b.buffer_of(BufShape { rows: Head::ROWS, width: hidden }),
        logits: b.buffer_of(BufShape { rows: Head::ROWS, width: vocab }),
    };
    Ok(Box::new(Qwen3Moe { embed, eps, layers, attention, moe, head, x, normed, added }))
}

impl Model for Qwen3Moe {
    fn forward(&self, cx: &mut Context<'_>, batch: &mut Batch<'_>) -> Result<()> {
        cx.backend.embed(self.embed, batch.tokens, self.x)?;
        self.attention.begin(cx, batch)?;
        for (i, layer) in self.layers.iter().enumerate() {
            cx.cancel.check()?;
            let i = LayerIdx(i);
            cx.backend.rms_norm(self.x, layer.attn_norm, self.eps, self.normed)?;
            self.attention.forward(cx, batch, i, &layer.attn, self.normed, self.added)?;
            cx.backend.add(self.x, self.added)?;

            cx.backend.rms_norm(self.x, layer.ffn_norm, self.eps, self.normed)?;
            let next = self.layers.get(i.0 + 1).map(|layer| layer.router);
            self.moe.forward(cx, i, Gates { here: layer.router, next }, self.added)?;
            cx.backend.add(self.x, self.added)?;
        }
        Ok(())
    }

    fn head(&self) -> &Head {
        &self.head
    }

    fn state(&self) -> Vec<KvShape> {
        vec![self.attention.kv; self.layers.len()]
    }
}
