"""Train the language model `tiny-lm` of the zoo, and write its weights: ``train_tiny_lm.py [--out FILE]``.

It is trained on the language reference of Python, as it comes with Python itself, in its module
`pydoc_data.topics` (of Python 3.11: 465 kB of English text and code; PSF licence, version 2). Nothing is
downloaded. Needs PyTorch (``pip install 'pimflow[torch]'``). Takes about eight minutes of one core; the same
versions of Python and PyTorch on the same machine give the same weights again.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from pimflow.zoo import weights
from pimflow.zoo.language.decoder import Decoder
from pimflow.zoo.language.shapes import TINY

STEPS, BATCH, WINDOW = 1400, 16, 256  # 5.7 million tokens
LEARNING_RATE, WARM_UP, WEIGHT_DECAY = 4e-3, 50, 0.1
HELD_OUT = 0.03  # share of the text that it is judged on
# Quotation marks, dashes and dots of the text, as ASCII has them.
PLAIN = {0x2019: "'", 0x2018: "'", 0x201C: '"', 0x201D: '"', 0x2026: "...", 0x2013: "-", 0x2014: "--"}


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes for training and for evaluation: the topics in order, of which the last are held out."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).translate(PLAIN)
    data = torch.tensor(list(text.encode("ascii", "ignore")))
    training_bytes = int(len(data) * (1 - HELD_OUT))
    return data[:training_bytes], data[training_bytes:]


def initial_weights(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Initial weights: those that end a residual are divided by the root of the number of residuals."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in decoder.weights().items():
        if name.endswith(".scale"):
            tensors[name] = torch.ones(shape)
            continue
        deviation = 0.02 if name == "tokens.table" else 0.6 / math.sqrt(shape[0])
        if name.endswith(("attention.weight", "down.weight")):
            deviation /= math.sqrt(2 * decoder.layers)
        tensors[name] = torch.randn(shape, generator=generator) * deviation
    return {name: value.requires_grad_() for name, value in tensors.items()}


def logits(decoder: Decoder, w: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Logits of every position of `tokens` [batch, length]: [batch, length, 256]."""
    batch, length = tokens.shape
    turns = decoder.rotary_base ** (-torch.arange(0, decoder.head_size, 2) / decoder.head_size)
    angles = torch.arange(length)[:, None] * torch.cat([turns, turns])
    cosine, sine = angles.cos(), angles.sin()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (decoder.hidden,), w[f"{name}.scale"], decoder.norm_epsilon)

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(batch, length, count, decoder.head_size).transpose(1, 2)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        """Rotary position embedding."""
        first, second = x.chunk(2, -1)
        return x * cosine + torch.cat([-second, first], -1) * sine

    hidden = w["tokens.table"][tokens]
    for layer in range(decoder.layers):
        name = f"layers.{layer}"
        x = norm(hidden, f"{name}.attention_norm")
        query = rotate(heads(x @ w[f"{name}.query.weight"], decoder.heads))
        key = rotate(heads(x @ w[f"{name}.key.weight"], decoder.kv_heads))
        value = heads(x @ w[f"{name}.value.weight"], decoder.kv_heads)
        key, value = (tensor.repeat_interleave(decoder.group, 1) for tensor in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + mixed.transpose(1, 2).reshape(batch, length, -1) @ w[f"{name}.attention.weight"]
        x = norm(hidden, f"{name}.feed_forward_norm")
        wide = F.silu(x @ w[f"{name}.gate.weight"]) * (x @ w[f"{name}.up.weight"])
        hidden = hidden + wide @ w[f"{name}.down.weight"]
    return norm(hidden, "norm") @ w["tokens.table"].T


def loss(decoder: Decoder, w: dict[str, torch.Tensor], text: torch.Tensor) -> torch.Tensor:
    """Mean loss of windows of text [batch, length + 1], in nats a byte."""
    with torch.autocast("cpu", torch.bfloat16):
        scores = logits(decoder, w, text[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="of 16 windows of 256 bytes (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=weights.TRAINED / f"{TINY.name}.npz", help="default: the zoo"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    text, held_out = corpus()
    w = initial_weights(TINY)
    decayed = [value for value in w.values() if value.ndim == 2]
    others = [value for value in w.values() if value.ndim == 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step in range(arguments.steps):
        done = step / arguments.steps
        rate = (
            LEARNING_RATE
            * min(1, (step + 1) / WARM_UP)
            * (0.5 * (1 + math.cos(math.pi * done)) * 0.98 + 0.02)
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(text) - WINDOW, (BATCH, 1), generator=generator)
        batch_loss = loss(TINY, w, text[starts + torch.arange(WINDOW + 1)])
        optimizer.zero_grad()
        batch_loss.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(
                f"step {step + 1}: {batch_loss.item():.3f} nats a byte, {time.process_time():.0f} s",
                flush=True,
            )
    stored = {name: value.detach().numpy().astype(np.float16) for name, value in w.items()}
    partial = arguments.out.with_suffix(".partial.npz")
    np.savez_compressed(partial, **stored)
    os.replace(partial, arguments.out)
    stored_weights = {name: torch.from_numpy(value.astype(np.float32)) for name, value in stored.items()}
    windows = held_out[: len(held_out) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
    with torch.no_grad():
        bits = loss(TINY, stored_weights, windows).item() / math.log(2)
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes; {bits:.3f} bits a byte of held-out text")


if __name__ == "__main__":
    main()
