#!/usr/bin/env python3
"""Writes crates/engine/tests/data/gguf_keys.txt: every setting of a model that GGUF files may have, and its type. The
engine's tests go through them: a setting that changes the arithmetic must be computed or refused.

    tools/gguf_keys.py LLAMA_CPP

LLAMA_CPP is a checkout of llama.cpp. The settings are those that its converter can write (gguf-py) and that its reader
knows (src/llama-arch.cpp). Needs nothing but Python.
"""

import ast
import re
import sys
from pathlib import Path

# Settings in files of other programs and of older converters, which llama.cpp no longer names.
OTHERS = {
    "attention.head_dim": "u32",
    "image_token_id": "u32",
    "image_token_index": "u32",
    "mm.projector_bias": "bool",
    "mrope_sections": "u32[]",
    "norm_top_k_prob": "bool",
    "rope.freq_base_per_layer": "f32[]",
    "rope.mrope_interleaved": "bool",
    "rope.mrope_section": "u32[]",
    "rope.scale_linear": "f32",
    "spatial_merge_size": "u32",
    "ssm.v_head_reordered": "bool",
    "swiglu_limits": "f32[]",
    "vision.block_count": "u32",
    "vision_end_token_id": "u32",
    "vision_start_token_id": "u32",
}

TYPES = {"add_uint32": "u32", "add_float32": "f32", "add_bool": "bool", "add_string": "str", "add_array": "[]"}


def names(source: str) -> dict[str, str]:
    """The settings of class Keys, by their paths in it."""
    found = {}

    def visit(body: list[ast.stmt], path: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{path}.{node.name}")
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                found[f"{path}.{node.targets[0].id}"] = str(node.value.value)

    keys = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Keys")
    visit(keys.body, "Keys")
    return found


def types(source: str, by_path: dict[str, str]) -> dict[str, str]:
    """The type with which the writer's methods add each setting; of several, the first."""
    found: dict[str, str] = {}
    for method in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)):
        paths = re.findall(r"Keys\.[A-Za-z_.]+(?=\.format)", ast.unparse(method))
        calls = [n.func.attr for n in ast.walk(method) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        kind = next((TYPES[c] for c in calls if c in TYPES), None)
        if kind == "[]":
            annotations = " ".join(ast.unparse(a.annotation) for a in method.args.args if a.annotation)
            kind = ("bool" if "bool" in annotations else "f32" if "float" in annotations else "u32") + "[]"
        for path in paths:
            if kind and path in by_path:
                found.setdefault(by_path[path], kind)
    return found


def main() -> None:
    llama_cpp = Path(sys.argv[1])
    read = lambda name: (llama_cpp / name).read_text()
    by_path = names(read("gguf-py/gguf/constants.py"))
    typed = types(read("gguf-py/gguf/gguf_writer.py"), by_path)
    known = {name.removeprefix("{arch}."): typed.get(name) for name in by_path.values() if name.startswith("{arch}.")}
    for name in re.findall(r'"%s\.([^"]*)"', read("src/llama-arch.cpp")):
        known.setdefault(name, None)
    known |= OTHERS
    # A number, where no method of the writer tells. Names with a placeholder stand for several.
    lines = [f"{name} {kind or 'f32'}\n" for name, kind in sorted(known.items()) if "{" not in name]
    out = Path(__file__).parent.parent / "crates/engine/tests/data/gguf_keys.txt"
    out.write_text("".join(lines))
    print(f"{out}: {len(lines)} settings")


if __name__ == "__main__":
    main()
