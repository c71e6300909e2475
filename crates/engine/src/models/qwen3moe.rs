//! Qwen3-MoE: grouped-query attention with normed queries and keys, every layer a mixture of experts.

use forebay_kernels::RopePairs;

use super::{Arch, Builder, Config, Model};
use crate::LayerIdx;
use crate::backend::{Buf, BufShape, ExpertBuffers, KvShape, Matrix, Rope, Router, Vector};
use crate::blocks::Context;
use crate::blocks::gqa::{Gqa, GqaWeights};
use crate::blocks::head::Head;
use crate::blocks::moe::{Gates, Moe};
use crate::blocks::rope::plain_frequencies;
use crate::error::Result;
use crate::session::Batch;

/// The family's entry in the registry.
pub const ARCH: Arch = Arch { gguf: "qwen3moe", describe };

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
    let layers = config.count("block_count")?;
    let hidden = config.count("embedding_length")?;
    let heads = config.count("attention.head_count")?;
    let kv_heads = config.optional_count("attention.head_count_kv")?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        return Err(config.error("attention.head_count_kv", "does not divide the number of heads"));
    }
    let key_dim = config.optional_count("attention.key_length")?.unwrap_or(hidden / heads);
    let value_dim = config.optional_count("attention.value_length")?.unwrap_or(key_dim);
    if key_dim == 0 || !key_dim.is_multiple_of(2) {
        return Err(config.error("attention.key_length", "is not an even number of channels"));
    }
    let eps = config.float("attention.layer_norm_rms_epsilon")?;
    let rope_base = config.optional_float("rope.freq_base")?.unwrap_or(10_000.0);
    match config.optional_text("rope.scaling.type")? {
        Some("none") => {}
        Some(other) => return Err(config.unsupported("rope.scaling.type", other)),
        // A factor without a type means linear scaling; older files have it under another name.
        None => {
            for key in ["rope.scaling.factor", "rope.scale_linear"] {
                if let Some(factor) = config.optional_float(key)?.filter(|&f| f != 1.0) {
                    return Err(config.unsupported(key, &factor.to_string()));
                }
            }
        }
    }
    if let Some(channels) = config.optional_count("rope.dimension_count")?.filter(|&n| n != key_dim) {
        return Err(config.unsupported("rope.dimension_count", &channels.to_string()));
    }
    let experts = config.count("expert_count")?;
    let top_k = config.count("expert_used_count")?;
    if top_k > experts {
        return Err(config.error("expert_used_count", "is larger than the number of experts"));
    }
    let router = Router { experts, top_k, normalise: true };
    let inner = config.count("expert_feed_forward_length")?;
    let vocab = b.rows_of("token_embd.weight")?;

    // The tensors come first: their shapes confirm the sizes that everything else is made by.
    let embed = b.table("token_embd.weight", vocab, hidden)?;
    let layers = (0..layers)
        .map(|l| {
            let name = |part: &str| format!("blk.{l}.{part}.weight");
            b.experts(
                &router,
                [
                    (&name("ffn_gate_exps"), inner, hidden),
                    (&name("ffn_up_exps"), inner, hidden),
                    (&name("ffn_down_exps"), hidden, inner),
                ],
            )?;
            Ok(Layer {
                attn_norm: b.vector(&name("attn_norm"), hidden)?,
                attn: GqaWeights {
                    q: b.matrix(&name("attn_q"), heads * key_dim, hidden)?,
                    k: b.matrix(&name("attn_k"), kv_heads * key_dim, hidden)?,
                    v: b.matrix(&name("attn_v"), kv_heads * value_dim, hidden)?,
                    out: b.matrix(&name("attn_output"), hidden, heads * value_dim)?,
                    q_norm: b.vector(&name("attn_q_norm"), key_dim)?,
                    k_norm: b.vector(&name("attn_k_norm"), key_dim)?,
                },
                ffn_norm: b.vector(&name("ffn_norm"), hidden)?,
                router: b.matrix(&name("ffn_gate_inp"), experts, hidden)?,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let norm = b.vector("output_norm.weight", hidden)?;
    // Without an output matrix of its own, a model uses the embedding for both.
    let tied = !b.has("output.weight");
    let output = if tied { embed } else { b.matrix("output.weight", vocab, hidden)? };

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
