//! A complete Qwen3-MoE model with random F32 weights, which tests can change.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::gguf_builder::{GgufBuilder, tensor_type, value_type};

pub const LAYERS: u64 = 2;
pub const HEADS: u64 = 4;
pub const KV_HEADS: u64 = 2;
pub const HEAD_DIM: u64 = 8;
pub const EXPERTS: u64 = 4;
pub const INNER: u64 = 16;
/// The context length in the file.
pub const CONTEXT: u32 = 96;
/// The vocabulary. Its last token ends an answer. The model has a few more tokens.
pub const TOKENS: [&str; 12] = ["a", "b", "c", "Ġ", "Ã", "©", ".", "ab", "Ġa", "abc", "d", "<end>"];
pub const VOCAB: u64 = TOKENS.len() as u64 + 4;

/// The model, with hidden states of `hidden` channels.
pub fn tiny_model(hidden: u64) -> GgufBuilder {
    let mut kinds = [1i32; TOKENS.len()];
    kinds[TOKENS.len() - 1] = 3;
    let mut file = GgufBuilder::new()
        .str("general.architecture", "qwen3moe")
        .u32("qwen3moe.block_count", LAYERS as u32)
        .u32("qwen3moe.context_length", CONTEXT)
        .u32("qwen3moe.embedding_length", hidden as u32)
        .u32("qwen3moe.attention.head_count", HEADS as u32)
        .u32("qwen3moe.attention.head_count_kv", KV_HEADS as u32)
        .u32("qwen3moe.attention.key_length", HEAD_DIM as u32)
        .u32("qwen3moe.attention.value_length", HEAD_DIM as u32)
        .f32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
        .f32("qwen3moe.rope.freq_base", 10_000.0)
        .u32("qwen3moe.expert_count", EXPERTS as u32)
        .u32("qwen3moe.expert_used_count", 2)
        .u32("qwen3moe.expert_feed_forward_length", INNER as u32)
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "qwen2")
        .strings("tokenizer.ggml.tokens", &TOKENS)
        .array(
            "tokenizer.ggml.token_type",
            value_type::I32,
            TOKENS.len() as u64,
            kinds.map(i32::to_le_bytes).concat(),
        )
        .strings("tokenizer.ggml.merges", &["a b", "Ġ a", "ab c"])
        .u32("tokenizer.ggml.eos_token_id", TOKENS.len() as u32 - 1)
        .str("tokenizer.chat_template", "{% for m in messages %}{{ m.content }}<end>{% endfor %}");

    let mut rng = ChaCha8Rng::seed_from_u64(17);
    let mut add = |name: &str, dims: &[u64]| {
        // Rows of about unit length keep the activations in range; norms are near one.
        let (middle, spread) =
            if dims.len() == 1 { (1.0, 0.1) } else { (0.0, (3.0 / dims[0] as f32).sqrt()) };
        let mut weight = || middle + spread * (rng.next_u32() as f32 / (1u32 << 31) as f32 - 1.0);
        let data = (0..dims.iter().product()).flat_map(|_: u64| weight().to_le_bytes()).collect();
        file = std::mem::take(&mut file).tensor_of(name, tensor_type::F32, dims, data);
    };
    add("token_embd.weight", &[hidden, VOCAB]);
    for layer in 0..LAYERS {
        let mut add = |part: &str, dims: &[u64]| add(&format!("blk.{layer}.{part}.weight"), dims);
        add("attn_norm", &[hidden]);
        add("attn_q", &[hidden, HEADS * HEAD_DIM]);
        add("attn_k", &[hidden, KV_HEADS * HEAD_DIM]);
        add("attn_v", &[hidden, KV_HEADS * HEAD_DIM]);
        add("attn_output", &[HEADS * HEAD_DIM, hidden]);
        add("attn_q_norm", &[HEAD_DIM]);
        add("attn_k_norm", &[HEAD_DIM]);
        add("ffn_norm", &[hidden]);
        add("ffn_gate_inp", &[hidden, EXPERTS]);
        add("ffn_gate_exps", &[hidden, INNER, EXPERTS]);
        add("ffn_up_exps", &[hidden, INNER, EXPERTS]);
        add("ffn_down_exps", &[INNER, hidden, EXPERTS]);
    }
    add("output_norm.weight", &[hidden]);
    add("output.weight", &[hidden, VOCAB]);
    file
}
