"""Small models of known bytes, and the state dict of each layout, spelled out by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_engine.mhc.integrations.deepseek_v4 import ModelParams

D = 8
# Signalling and quiet NaNs with payloads, both zeros, infinities, a subnormal, one.
EDGE_BITS = (0x7F800001, 0xFFA12345, 0x7FC0BEEF, 0x80000000, 0x00000000, 0x7F800000, 0xFF800000, 0x00000001, 0x3F800000)


def from_bits(bits: list[int]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(b.to_bytes(4, "little") for b in bits)), dtype=torch.float32).clone()


def bits_of(t: Tensor) -> tuple[object, ...]:
    """dtype, shape and the raw bytes; a NaN's payload counts."""
    return t.dtype, tuple(t.shape), t.detach().contiguous().view(torch.uint8).numpy().tobytes()


def raw(tensors: Mapping[str, Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: bits_of(t) for name, t in tensors.items()}


def draw(name: str, *shape: int) -> Tensor:
    """Random encodings that the name alone decides, the edge values among them."""
    count = int(torch.Size(shape).numel())
    stream = hashlib.shake_256(name.encode()).digest(4 * count)
    bits = [int.from_bytes(stream[4 * i : 4 * i + 4], "little") for i in range(count)]
    for i in range(0, count, 3):
        bits[i] = EDGE_BITS[(i // 3 + stream[0]) % len(EDGE_BITS)]
    return from_bits(bits).reshape(shape)


def published(layers: int = 2, hidden: int = D, name: str = "model") -> dict[str, Tensor]:
    """The published checkpoint of a small model, with tensors that have nothing to do with mHC."""
    tensors = {"embed.weight": torch.zeros(3, hidden, dtype=torch.bfloat16)}
    for i in range(layers):
        tensors[f"layers.{i}.attn.wq_a.weight"] = torch.ones(2, hidden, dtype=torch.bfloat16)
        for sublayer in ("attn", "ffn"):
            stem = f"layers.{i}.hc_{sublayer}_"
            tensors[stem + "fn"] = draw(name + stem + "fn", 24, 4 * hidden)
            tensors[stem + "base"] = draw(name + stem + "base", 24)
            tensors[stem + "scale"] = draw(name + stem + "scale", 3)
    tensors["hc_head_fn"] = draw(name + "head.fn", 4, 4 * hidden)
    tensors["hc_head_base"] = draw(name + "head.base", 4)
    tensors["hc_head_scale"] = draw(name + "head.scale", 1)
    # A multi-token prediction layer has parameters of the same names.
    tensors["mtp.0.hc_attn_fn"] = torch.zeros(24, 4 * hidden)
    tensors["mtp.0.hc_head_fn"] = torch.zeros(4, 4 * hidden)
    return tensors


def expected(layout: str, layers: int = 2, hidden: int = D, name: str = "model") -> dict[str, Tensor]:
    """The mHC tensors of ``published`` under the names of ``layout``."""
    old = published(layers, hidden, name)
    new = {}
    for i in range(layers):
        for sublayer, place in (("attn", "self_attention"), ("ffn", "mlp")):
            fn, base, scale = (old[f"layers.{i}.hc_{sublayer}_{part}"] for part in ("fn", "base", "scale"))
            if layout in ("published", "huggingface-saved"):
                stem = f"{'' if layout == 'published' else 'model.'}layers.{i}.hc_{sublayer}_"
                new |= {stem + "fn": fn, stem + "base": base, stem + "scale": scale}
            elif layout == "huggingface":
                stem = f"model.layers.{i}.{sublayer}_hc."
                new |= {stem + "fn": fn, stem + "base": base, stem + "scale": scale}
            else:
                stem = f"decoder.layers.{i}.{place}_hyper_connection."
                new |= {stem + "mapping_proj.weight": fn, stem + "bias": base}
                new |= {stem + "alpha_pre": scale[0:1], stem + "alpha_post": scale[1:2], stem + "alpha_res": scale[2:3]}
    head = {"published": "hc_head_", "megatron": "decoder.hc_head_"}.get(layout, "model.hc_head.hc_")
    return new | {head + part: old["hc_head_" + part] for part in ("fn", "base", "scale")}


def model_bits(model: ModelParams) -> dict[str, tuple[object, ...]]:
    """Every tensor of a model under one flat name each."""
    found = {}
    for site, controller in model.controllers.items():
        for part in ("weight", "alpha_pre", "alpha_post", "alpha_res", "bias"):
            found[f"{site}.{part}"] = bits_of(getattr(controller, part))
    if model.head is not None:
        found |= {f"head.{part}": bits_of(getattr(model.head, part)) for part in ("fn", "base", "scale")}
    return found
