"""Models that transformers does not have, written from their publishers' descriptions, for tiny_families.py.

They have the tensors of published models, and compute what the models' own code computes, slowly and plainly. llama.cpp
agrees with them, except where `Settings` has a setting that says otherwise.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import linear, relu, silu


class Settings(SimpleNamespace):
    """The content of config.json. What is not in it is false or the default."""

    DEFAULTS = {
        "tie_word_embeddings": False,
        "norm_head": False,
        # llama.cpp gives the small experts of GroveMoE what the large ones return, and the weights of other experts.
        "as_llama_cpp": False,
    }

    def __getattr__(self, name: str):
        if name in Settings.DEFAULTS:
            return Settings.DEFAULTS[name]
        raise AttributeError(name)


def matrix(inner: int, outer: int) -> nn.Linear:
    return nn.Linear(inner, outer, bias=False)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Grouped queries, causal, with rope of halves. `rotated` is 0 for none, `window` is 0 for all positions."""

    def __init__(self, config: Settings, normed: bool, rotated: int, window: int = 0, fused: bool = False) -> None:
        super().__init__()
        self.config, self.normed, self.rotated, self.window, self.fused = config, normed, rotated, window, fused
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        if fused:
            self.query_key_value = matrix(config.hidden_size, queries + 2 * keys)
            self.dense = matrix(queries, config.hidden_size)
        else:
            self.q_proj = matrix(config.hidden_size, queries)
            self.k_proj, self.v_proj = matrix(config.hidden_size, keys), matrix(config.hidden_size, keys)
            self.o_proj = matrix(queries, config.hidden_size)
        if normed:
            names = ("query_layernorm", "key_layernorm") if fused else ("q_norm", "k_norm")
            for name in names:
                setattr(self, name, Norm(config.head_dim, config.rms_norm_eps))
            self.norm_names = names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config, length = self.config, len(x)
        if self.fused:
            sizes = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
            q, k, v = self.query_key_value(x).split([size * config.head_dim for size in sizes], -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (values.view(length, -1, config.head_dim).transpose(0, 1) for values in (q, k, v))
        if self.normed:
            q, k = getattr(self, self.norm_names[0])(q), getattr(self, self.norm_names[1])(k)
        if self.rotated:
            q, k = self.rotate(q), self.rotate(k)
        groups = config.num_attention_heads // config.num_key_value_heads
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        back = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (back < 0) | ((back >= self.window) if self.window else False)
        scores = (q @ k.transpose(1, 2) / config.head_dim**0.5).masked_fill(hidden, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        return self.dense(out) if self.fused else self.o_proj(out)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = self.rotated // 2
        frequencies = self.config.rope_theta ** -(torch.arange(half) / half)
        angles = torch.arange(x.shape[1])[:, None] * frequencies
        first, second = x[..., :half], x[..., half : self.rotated]
        turned = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
        return torch.cat([*turned, x[..., self.rotated :]], -1)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int, names=("gate_proj", "up_proj", "down_proj"), activation=silu) -> None:
        super().__init__()
        self.names, self.activation = names, activation
        for name, shape in zip(names, [(width, inner), (width, inner), (inner, width)]):
            setattr(self, name, matrix(*shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.activation(gate(x)) * up(x))


def weighted(experts: nn.ModuleList, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of the chosen experts' outputs. All experts are computed for all positions."""
    outputs = torch.stack([expert(x) for expert in experts])
    rows = torch.arange(len(x))[:, None]
    return (outputs[chosen, rows] * weights[..., None]).sum(1)


class Reference(nn.Module):
    """A model with the methods of transformers that tiny_families.py calls."""

    config_class = Settings
    # The prefix of the embeddings' name, and the class name of published models.
    embedding, published = "embed_tokens", ""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        self.model = nn.Module()
        setattr(self.model, self.embedding, nn.Embedding(config.vocab_size, config.hidden_size))
        self.model.layers = nn.ModuleList(self.layer(index) for index in range(config.num_hidden_layers))
        self.model.norm = Norm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = matrix(config.hidden_size, config.vocab_size)

    def layer(self, index: int) -> nn.Module:
        raise NotImplementedError

    def get_input_embeddings(self) -> nn.Embedding:
        return getattr(self.model, self.embedding)

    def forward(self, tokens: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        x = self.get_input_embeddings()(tokens[0])
        for layer in self.model.layers:
            x = layer(x)
        head = self.get_input_embeddings().weight if self.config.tie_word_embeddings else self.lm_head.weight
        if self.config.norm_head:
            head = head / (head.norm(dim=0, keepdim=True) + 1e-7)
        return SimpleNamespace(logits=linear(self.model.norm(x), head)[None])

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        save_file(self.state_dict(), folder / "model.safetensors")
        settings = {key: value for key, value in vars(self.config).items() if not key.startswith("_")}
        settings |= {"architectures": [self.published], "dtype": "bfloat16", "transformers_version": ""}
        (folder / "config.json").write_text(json.dumps(settings))

    @classmethod
    def from_pretrained(cls, folder: Path, output_loading_info: bool = False, **_):
        model = cls(Settings(**json.loads((folder / "config.json").read_text())))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return (model, {}) if output_loading_info else model


class Block(nn.Module):
    """A layer with a norm before each of its two parts, under the names that the model has for them."""

    def __init__(self, config: Settings, attention: str, mixer: nn.Module, mlp: str, experts: nn.Module) -> None:
        super().__init__()
        self.parts = attention, mlp
        setattr(self, attention, mixer)
        setattr(self, mlp, experts)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention, mlp = (getattr(self, part) for part in self.parts)
        after = x + attention(self.input_layernorm(x))
        # Some routers see the input of the layer.
        routed = {"router_input": x} if getattr(mlp, "routes_early", False) else {}
        return after + mlp(self.post_attention_layernorm(after), **routed)


class BailingExperts(nn.Module):
    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = matrix(width, config.num_experts)
        if getattr(config, "moe_router_enable_expert_bias", False):
            self.gate.expert_bias = nn.Parameter(torch.zeros(config.num_experts))
        self.experts = nn.ModuleList(Mlp(width, inner) for _ in range(config.num_experts))
        self.shared_experts = Mlp(width, inner * config.num_shared_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config, logits = self.config, self.gate(x)
        if hasattr(self.gate, "expert_bias"):
            scores = logits.sigmoid()
            selection = scores + self.gate.expert_bias
            groups = selection.view(len(x), config.n_group, -1)
            best = groups.topk(2, -1).values.sum(-1).topk(config.topk_group, -1).indices
            kept = torch.zeros(len(x), config.n_group, dtype=torch.bool).scatter(1, best, True)
            selection = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        else:
            scores = selection = logits.softmax(-1)
        chosen = selection.topk(config.num_experts_per_tok, -1).indices
        weights = scores.gather(-1, chosen)
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * getattr(config, "routed_scaling_factor", 1.0)
        return weighted(self.experts, x, chosen, weights) + self.shared_experts(x)


class Bailing(Reference):
    """Ling 1"""

    embedding, published = "word_embeddings", "BailingMoeForCausalLM"

    def layer(self, index: int) -> nn.Module:
        config = self.config
        attention = Attention(config, normed=False, rotated=config.head_dim, fused=True)
        return Block(config, "attention", attention, "mlp", BailingExperts(config))


class Bailing2(Reference):
    """Ling 2 and Ring 2"""

    embedding, published = "word_embeddings", "BailingMoeV2ForCausalLM"

    def layer(self, index: int) -> nn.Module:
        config = self.config
        rotated = int(config.head_dim * config.partial_rotary_factor)
        attention = Attention(config, normed=True, rotated=rotated, fused=True)
        dense = index < config.first_k_dense_replace
        mlp = Mlp(config.hidden_size, config.intermediate_size) if dense else BailingExperts(config)
        return Block(config, "attention", attention, "mlp", mlp)


class SmallThinkerExperts(nn.Module):
    routes_early = True

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        width, inner, count = config.hidden_size, config.moe_ffn_hidden_size, config.moe_num_primary_experts
        self.primary_router = matrix(width, count)
        self.experts = nn.ModuleList(Mlp(width, inner, ("gate", "up", "down"), relu) for _ in range(count))

    def forward(self, x: torch.Tensor, router_input: torch.Tensor) -> torch.Tensor:
        logits, chosen = self.primary_router(router_input).topk(self.config.moe_num_active_primary_experts, -1)
        if self.config.moe_primary_router_apply_softmax:
            weights = logits.softmax(-1)
        else:
            weights = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        return weighted(self.experts, x, chosen, weights)


class SmallThinker(Reference):
    published = "SmallThinkerForCausalLM"

    def layer(self, index: int) -> nn.Module:
        config = self.config
        rotated = config.head_dim if config.rope_layout[index] else 0
        window = config.sliding_window_size if config.sliding_window_layout[index] else 0
        attention = Attention(config, normed=False, rotated=rotated, window=window)
        return Block(config, "self_attn", attention, "block_sparse_moe", SmallThinkerExperts(config))


class GroveExperts(nn.Module):
    # Fixed in the model's code. The width of small experts is 128 there, which is also the size of a head.
    GROUP, SCALE = 2, 0.05

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.config = config
        width, count = config.hidden_size, config.num_experts
        self.gate = matrix(width, count)
        # Nothing reads it.
        self.expert_bias = nn.Parameter(torch.zeros(count))
        self.experts = nn.ModuleList(Mlp(width, config.moe_intermediate_size) for _ in range(count))
        self.chunk_experts = nn.ModuleList(Mlp(width, config.head_dim) for _ in range(count // self.GROUP))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x)
        chosen = logits.sigmoid().topk(self.config.num_experts_per_tok, -1).indices
        weights = logits.softmax(-1).gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        large = weighted(self.experts, x, chosen, weights)
        chosen, seen = chosen // self.GROUP, x
        if self.config.as_llama_cpp:
            seen, weights = large, logits.softmax(-1).gather(-1, chosen)
            weights = weights / weights.sum(-1, keepdim=True)
        return large + self.SCALE * weighted(self.chunk_experts, seen, chosen, weights)


class Grove(Reference):
    published = "GroveMoeForCausalLM"

    def layer(self, index: int) -> nn.Module:
        config = self.config
        attention = Attention(config, normed=True, rotated=config.head_dim)
        return Block(config, "self_attn", attention, "mlp", GroveExperts(config))
