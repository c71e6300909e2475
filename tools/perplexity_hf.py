#!/usr/bin/env python3
"""Prints the perplexity of a text by Hugging Face transformers, with the windows of `forebay perplexity`.

  perplexity_hf.py MODEL TEXT [--ctx 512]

MODEL is a Hugging Face folder, or a GGUF file that transformers can read (its weights are dequantised). Needs
`pip install torch==2.15.0 transformers==5.22.2 accelerate==1.15.0 gguf==0.18.0`.
"""
import argparse
import math
import pathlib

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("model", type=pathlib.Path)
parser.add_argument("text", type=pathlib.Path)
parser.add_argument("--ctx", type=int, default=512)
args = parser.parse_args()

if args.model.is_dir():
    source, options = args.model, {}
else:
    source, options = args.model.parent, {"gguf_file": args.model.name}
tokenizer = AutoTokenizer.from_pretrained(source, **options)
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options).eval()
tokens = tokenizer(args.text.read_text(), add_special_tokens=False)["input_ids"]
surprise, count = 0.0, 0
with torch.no_grad():
    for start in range(0, len(tokens), args.ctx):
        window = torch.tensor([tokens[start : start + args.ctx]])
        if window.shape[1] < 2:
            break
        logits = model(window).logits[0, :-1].double()
        chosen = logits.log_softmax(-1).gather(1, window[0, 1:, None])
        surprise -= chosen.sum().item()
        count += window.shape[1] - 1
print(f"perplexity {math.exp(surprise / count):.4f} · {count} tokens in windows of {args.ctx}")
