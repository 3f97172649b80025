"""The contract's blocks inside a DeepSeek-V4 model of transformers, in place and reversibly.

    with install(model):
        model.generate(...)

What changes is the arithmetic around each sublayer: coefficients, aggregation, the norm in front of it
(``input_layernorm``, ``post_attention_layernorm``) and the mix of its output into the streams; the expansion of the
embedding to four streams; and ``hc_head``, which merges them. Forward and backward are those of ``ops`` under
``controller_rms="rsqrt-mean-plus-eps"``. Attention, MoE, the last norm and ``lm_head`` stay transformers' own. So do
the parameters, the same objects under the same names: optimizers, ``save_pretrained`` and ``from_pretrained`` see no
difference.

How far one block is from the untouched model's, for the same streams:

- PRE, POST and C differ by the roundings of the FP32 projection, which the contract folds in one ascending chain: in a
  small random model by less than 2e-6 of the largest of their kind. A small coefficient is moved by the same errors of
  its logit, so by a few 1e-6 of itself; the wider the streams, the longer the chain.
- The input of a sublayer and the output of ``hc_head`` are FP32 sums that both round to BF16 once.
- The new streams are ``POST[j] * y + sum_i C[i, j] * R[i]``. The contract rounds this to BF16 once; transformers rounds
  POST and C, both products and their sum. With ``u = 2^-8``, the unit roundoff of BF16, and M the sum of the terms'
  magnitudes, that is ``2u M`` for coefficients and products, ``u M`` for the sum and ``u M`` for the contract's own
  rounding: with terms of second order under ``4.1 u M``, which is 4.1 BF16 ulps of M.

Over layers such differences add up, and where a router then picks another expert they are no longer small.

Each row of a block is computed by itself, so its bytes do not depend on the batch or the length of a sequence.
Attention and MoE of transformers promise no such thing: the model as a whole is not independent of the batch, with the
blocks or without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rl_engine.mhc.checks import FP32, check_tensor
from rl_engine.mhc.contract import (
    GAMMA_DTYPES,
    HC_MULT,
    MHC_EPS,
    ORACLE_PROFILE,
    PROD_CONTROLLER_N,
    RMSNORM_EPS,
    SINKHORN_ITERS,
)

_CONFIG = {
    "hc_mult": HC_MULT,
    "hc_sinkhorn_iters": SINKHORN_ITERS,
    "hc_eps": MHC_EPS,
    "rms_norm_eps": RMSNORM_EPS,
}
_SITES = (("attn_hc", "input_layernorm"), ("ffn_hc", "post_attention_layernorm"))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REMEDY = "load the model with from_pretrained(..., dtype=torch.bfloat16)"


@dataclass(frozen=True)
class _Swap:
    """A module by its name in the model, the class that it had and the one that it gets."""

    name: str
    module: Any
    before: type
    after: type


class Installation:
    """What ``install`` returns: it takes the blocks out again, by ``restore()`` or at the end of a ``with``."""

    def __init__(self, swaps: tuple[_Swap, ...]) -> None:
        self._swaps = swaps

    @property
    def installed(self) -> bool:
        """Whether there is something to restore."""
        return bool(self._swaps)

    def restore(self) -> None:
        """Give the modules back their classes; the model then computes what it did before. A second call does nothing.

        A copy of the model that was made in between keeps the blocks. ``RuntimeError``, and nothing is changed, where a
        module has got yet another class in the meantime.
        """
        for swap in self._swaps:
            if type(swap.module) is not swap.after:
                raise RuntimeError(f"{swap.name}: got {_dotted(type(swap.module))}, want {_dotted(swap.after)}")
        for swap in self._swaps:
            swap.module.__class__ = swap.before
            del swap.module._mhc_numeric_profile
        self._swaps = ()

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def install(model: nn.Module, *, numeric_profile: str = ORACLE_PROFILE) -> Installation:
    """Put the contract's blocks into ``model``, in place. All of it is checked before anything is changed.

    ``model`` is, or holds, one ``DeepseekV4Model``: ``DeepseekV4ForCausalLM``, or a wrapper of it. Its embedding is
    BF16, its controllers and ``hc_head`` FP32, as ``from_pretrained(..., dtype=torch.bfloat16)`` gives them; the norms'
    weights are FP32 or BF16.

    Errors name the field, what came and what is wanted: ``ValueError`` for ``hc_mult``, ``hc_sinkhorn_iters``,
    ``hc_eps`` or ``rms_norm_eps`` other than the contract's and for a wrong shape; ``TypeError`` for a wrong dtype and
    for no ``DeepseekV4Model`` or several; ``NotImplementedError`` ("fail-closed") for a module that is not
    transformers' own, such as one with the blocks in it already, for hooks and a ``forward`` that would be passed by,
    and where ``ops`` has no backend for the device and ``numeric_profile``; ``ImportError`` without transformers.
    """
    try:
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

        from rl_engine.mhc.integrations.deepseek_v4 import adapted_modules as adapted
    except ImportError as error:
        raise ImportError(f"transformers: {error}; want transformers>=5.20, which the extra `hf` installs") from error
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, modeling.DeepseekV4Model)]
    if len(found) != 1:
        raise TypeError(f"model: got {type(model).__name__} with {len(found)} DeepseekV4Model, want one of them")
    ((path, base),) = found
    prefix = f"{path}." if path else ""
    _check_model(base, prefix)
    swaps = []
    for index, layer in enumerate(base.layers):
        swap = _Swap(f"{prefix}layers.{index}", layer, modeling.DeepseekV4DecoderLayer, adapted.DeepseekV4DecoderLayer)
        _check_layer(swap, base.config.hidden_size, modeling, numeric_profile)
        swaps.append(swap)
    head = _Swap(f"{prefix}hc_head", base.hc_head, modeling.DeepseekV4HyperHead, adapted.DeepseekV4HyperHead)
    _check_head(head, base.config.hidden_size, numeric_profile)
    swaps.append(head)
    for swap in swaps:
        swap.module._mhc_numeric_profile = numeric_profile
        swap.module.__class__ = swap.after
    return Installation(tuple(swaps))


def _check_model(base: Any, prefix: str) -> None:
    for field, wanted in _CONFIG.items():
        _check_value(f"{prefix}config.{field}", getattr(base.config, field), wanted)
    dtype = base.embed_tokens.weight.dtype
    if dtype != torch.bfloat16:
        raise TypeError(
            f"{prefix}embed_tokens.weight: got dtype {dtype}, want torch.bfloat16, that of the streams; {_REMEDY}"
        )


def _check_layer(swap: _Swap, hidden: int, modeling: Any, numeric_profile: str) -> None:
    _check_own(swap.module, swap.name, swap.before)
    for hc_name, norm_name in _SITES:
        hc, norm = getattr(swap.module, hc_name), getattr(swap.module, norm_name)
        hc_name, norm_name = f"{swap.name}.{hc_name}", f"{swap.name}.{norm_name}"
        _check_own(hc, hc_name, modeling.DeepseekV4HyperConnection, passed_by=True)
        _check_own(norm, norm_name, modeling.DeepseekV4RMSNorm, passed_by=True)
        for field in ("hc_mult", "hc_sinkhorn_iters", "hc_eps"):
            _check_value(f"{hc_name}.{field}", getattr(hc, field), _CONFIG[field])
        for name, value in (*_epsilons(f"{hc_name}.input_norm", hc.input_norm), *_epsilons(norm_name, norm)):
            _check_value(name, value, RMSNORM_EPS)
        shapes = {"fn": (PROD_CONTROLLER_N, HC_MULT * hidden), "base": (PROD_CONTROLLER_N,), "scale": (3,)}
        _check_parameters(hc, hc_name, shapes, numeric_profile)
        gamma_dtypes = tuple(GAMMA_DTYPES.values())
        check_tensor(f"{norm_name}.weight", norm.weight, (hidden,), gamma_dtypes, hc.fn.device)


def _check_head(swap: _Swap, hidden: int, numeric_profile: str) -> None:
    head = swap.module
    _check_own(head, swap.name, swap.before)
    _check_value(f"{swap.name}.hc_mult", head.hc_mult, HC_MULT)
    _check_value(f"{swap.name}.eps", head.eps, MHC_EPS)
    for name, value in _epsilons(f"{swap.name}.input_norm", head.input_norm):
        _check_value(name, value, RMSNORM_EPS)
    shapes = {"hc_fn": (HC_MULT, HC_MULT * hidden), "hc_base": (HC_MULT,), "hc_scale": (1,)}
    _check_parameters(head, swap.name, shapes, numeric_profile)


def _epsilons(name: str, norm: Any) -> Iterator[tuple[str, object]]:
    """The norm's eps, under the name that this version of transformers has for it."""
    fields = [field for field in ("variance_epsilon", "eps") if hasattr(norm, field)] or ["variance_epsilon"]
    yield from ((f"{name}.{field}", getattr(norm, field, None)) for field in fields)


def _check_value(field: str, value: object, wanted: int | float) -> None:
    if value != wanted:
        raise ValueError(f"{field}: got {value!r}, want {wanted!r} (the contract's)")


def _check_own(module: Any, name: str, wanted: type, passed_by: bool = False) -> None:
    """Refuse what is not transformers' own class, and what would be lost where a module is not called any more."""
    if type(module) is not wanted:
        raise NotImplementedError(f"{name}: got {_dotted(type(module))}, want {_dotted(wanted)} (fail-closed)")
    if "forward" in vars(module):
        raise NotImplementedError(f"{name}.forward: got one of the instance's own, want the class's (fail-closed)")
    hooks = [kind.removeprefix("_") for kind in _HOOKS if passed_by and getattr(module, kind)]
    if hooks:
        raise NotImplementedError(f"{name}: got {hooks[0]}, want none, as it is not called any more (fail-closed)")


def _check_parameters(module: Any, name: str, shapes: dict[str, tuple[int, ...]], numeric_profile: str) -> None:
    from rl_engine.mhc.ops import backend_for

    device = getattr(module, next(iter(shapes))).device
    for part, shape in shapes.items():
        value = getattr(module, part)
        if value.dtype == torch.bfloat16:
            raise TypeError(
                f"{name}.{part}: got dtype torch.bfloat16, want torch.float32, which a cast of the whole model has "
                f"rounded; {_REMEDY}, which keeps it"
            )
        check_tensor(f"{name}.{part}", value, shape, FP32, device)
    backend_for(device.type, numeric_profile)


def _dotted(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
