"""A small random DeepSeek-V4 model of transformers, and what is seen inside it while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

from rl_engine.mhc.bits import same_bytes

HIDDEN, VOCABULARY = 64, 96
SITES = (("attn_hc", "input_layernorm", "self_attn"), ("ffn_hc", "post_attention_layernorm", "mlp"))


def small_config(**changes: Any) -> DeepseekV4Config:
    """Four layers: each kind of attention and of MoE."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "sliding_window": 8,
        "max_position_embeddings": 128,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "partial_rotary_factor": 0.5,
        "eos_token_id": None,
    }
    return DeepseekV4Config(**{**settings, **changes})


def save_model(path: Path, **changes: Any) -> None:
    """A checkpoint of that model as transformers initializes it."""
    _save(path, small_config(**changes), wide=False)


def save_wide_model(path: Path) -> None:
    """The same with streams, sublayers, controllers and norms of order one, so that each of them can be seen to act."""
    _save(path, small_config(initializer_range=0.2), wide=True)


def _save(path: Path, config: DeepseekV4Config, wide: bool) -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(20240607)
        model = DeepseekV4ForCausalLM(config)
        for layer in model.model.layers:
            if hasattr(layer.mlp.gate, "tid2eid"):
                layer.mlp.gate.tid2eid.random_(config.n_routed_experts)
        if wide:
            model.model.embed_tokens.weight.normal_()
            for name, parameter in model.named_parameters():
                if "_hc." in name:
                    scale = (4 * HIDDEN) ** -0.5 if name.endswith("fn") else 0.5
                    parameter.normal_(std=scale).add_(1.0 if name.endswith("scale") else 0.0)
                elif name.endswith("norm.weight"):
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(path)


def load_model(path: Path) -> DeepseekV4ForCausalLM:
    """The checkpoint as it is trained and served: BF16, controllers and norms FP32."""
    return DeepseekV4ForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager").eval()


def tokens(rows: int = 2, length: int = 17) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(rows * length))


def logits(model: Any, ids: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens() if ids is None else ids).logits
    return found


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def unequal(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """The names under which the two hold other bytes."""
    assert list(got) == list(want)
    return [name for name in want if not same_bytes(got[name], want[name])]


@dataclass
class Seen:
    """What one block boundary of the untouched model read and wrote, one token a row."""

    streams: Tensor
    post: Tensor
    c: Tensor
    hidden: Tensor
    pre: Tensor = field(default_factory=lambda: torch.empty(0))
    y: Tensor = field(default_factory=lambda: torch.empty(0))
    new_streams: Tensor = field(default_factory=lambda: torch.empty(0))


class _Sigmoids(TorchDispatchMode):
    """Keeps what every sigmoid returns: PRE minus eps is the first of a hyper-connection, and not returned by it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.sigmoid.default:
            self.found.append(out.clone())
        return out


@contextmanager
def watched(model: DeepseekV4ForCausalLM) -> Iterator[dict[str, Seen]]:
    """Within the block, what each boundary of the untouched model does, by a name such as ``0.attn_hc``."""
    seen: dict[str, Seen] = {}
    handles = []

    def rows(t: Tensor, keep: int) -> Tensor:
        return t.detach().reshape(-1, *t.shape[-keep:]).clone()

    def on_hc(name: str) -> Any:
        def hook(hc: nn.Module, args: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> None:
            with _Sigmoids() as mode:
                hc.forward(args[0])
            post, c, hidden = out
            seen[name] = Seen(rows(args[0], 2), rows(post, 1), rows(c, 2), rows(hidden, 1))
            seen[name].pre = rows(mode.found[0] + hc.hc_eps, 1)

        return hook

    def on_sublayer(name: str) -> Any:
        def hook(_: nn.Module, args: Any, out: Any) -> None:
            seen[name].y = rows(out[0] if isinstance(out, tuple) else out, 1)

        return hook

    def on_layer(name: str) -> Any:
        def hook(_: nn.Module, args: Any, out: Tensor) -> None:
            seen[f"{name}.attn_hc"].new_streams = seen[f"{name}.ffn_hc"].streams
            seen[f"{name}.ffn_hc"].new_streams = rows(out, 2)

        return hook

    for index, layer in enumerate(model.model.layers):
        for hc, _, sublayer in SITES:
            handles.append(getattr(layer, hc).register_forward_hook(on_hc(f"{index}.{hc}")))
            handles.append(getattr(layer, sublayer).register_forward_hook(on_sublayer(f"{index}.{hc}")))
        handles.append(layer.register_forward_hook(on_layer(str(index))))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
