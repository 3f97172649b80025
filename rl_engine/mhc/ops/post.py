"""``mhc_post`` as a differentiable operation, alone and as the second half of a linked block."""

from __future__ import annotations

from typing import Any

import torch

from rl_engine.mhc.contract import ORACLE_PROFILE
from rl_engine.mhc.ops.define import BF16, FP32, define, differentiate, needed, stored, unobserved
from rl_engine.mhc.ops.registry import backend_for

Tensor = torch.Tensor
_Gates = tuple[Tensor, Tensor, Tensor]


def mhc_post(r_old: Tensor, y: Tensor, c: Tensor, post: Tensor, *, numeric_profile: str = ORACLE_PROFILE) -> Tensor:
    """BF16 ``r_new[T, 4, D]`` of BF16 ``r_old[T, 4, D]``, ``y[T, D]``, FP32 ``c[T, 4, 4]``, ``post[T, 4]``.

    ``r_new[j] = tree_i(C[i, j] * R[i]) + (POST[j] * y)``, rounded to BF16 once; so are the gradients of ``r_old`` and
    ``y``. Those of ``c`` and ``post`` are FP32. Where ``r_old`` has another use, autograd adds two rounded gradients;
    ``mhc_post_linked`` adds them before the rounding. Errors: those of the operator, and ``NotImplementedError``
    ("fail-closed") where no backend is registered.
    """
    run = _forward if unobserved(r_old, y, c, post) else _op
    r_new: Tensor = run(r_old, y, c, post, numeric_profile)
    return r_new


def mhc_post_linked(
    r_old: Tensor, y: Tensor, c: Tensor, post: Tensor, link: Tensor, *, numeric_profile: str = ORACLE_PROFILE
) -> Tensor:
    """``mhc_post``, behind the ``mhc_pre_rmsnorm`` of the same ``r_old`` that returned ``link``.

    The gradient of ``r_old`` is not here: the arriving gradient goes to ``mhc_pre_rmsnorm`` as that of ``link``, and
    both legs are summed there in FP32 and rounded once. Each link is for one call; a second one's gradient would be
    added in BF16. The gradients of ``y`` (BF16, rounded once), ``c`` and ``post`` (FP32) are those of ``mhc_post``.
    Errors: those of ``mhc_post``; ``ValueError`` for a link of another shape, ``TypeError`` for one of another dtype.
    """
    run = _linked if unobserved(r_old, y, c, post, link) else _linked_op
    r_new: Tensor = run(r_old, y, c, post, link, numeric_profile)
    return r_new


def _forward(r_old: Tensor, y: Tensor, c: Tensor, post: Tensor, numeric_profile: str) -> Tensor:
    return stored(backend_for(r_old.device.type, numeric_profile).mhc_post_fwd(r_old, y, c, post), BF16)


def _forward_fake(r_old: Tensor, y: Tensor, c: Tensor, post: Tensor, numeric_profile: str) -> Tensor:
    return r_old.new_empty(r_old.shape)


def _backward(
    d_r_new: Tensor, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor, numeric_profile: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ops = backend_for(r_old.device.type, numeric_profile)
    d_r, d_y, d_c, d_post = ops.mhc_post_bwd(d_r_new, r_old, y, c, post)
    return stored(d_r, BF16), stored(d_y, BF16), stored(d_c, FP32), stored(d_post, FP32)


def _backward_fake(
    d_r_new: Tensor, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor, numeric_profile: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (r_old.new_empty(r_old.shape), *_linked_bwd_fake(d_r_new, r_old, y, c, post, numeric_profile))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    r_old, y, c, post, *_, ctx.numeric_profile = inputs
    ctx.save_for_backward(r_old, y, c, post)


def _formula(ctx: Any, d_r_new: Tensor) -> tuple[Tensor | None, ...]:
    return needed(ctx, _op_bwd(d_r_new, *ctx.saved_tensors, ctx.numeric_profile))


def _linked(r_old: Tensor, y: Tensor, c: Tensor, post: Tensor, link: Tensor, numeric_profile: str) -> Tensor:
    if link.dtype != BF16:
        raise TypeError(f"mhc_post_linked: link: got dtype {link.dtype}, want {BF16}")
    if link.shape != r_old.shape:
        raise ValueError(f"mhc_post_linked: link: got shape {tuple(link.shape)}, want {tuple(r_old.shape)} (r_old's)")
    return _forward(r_old, y, c, post, numeric_profile)


def _linked_fake(r_old: Tensor, y: Tensor, c: Tensor, post: Tensor, link: Tensor, numeric_profile: str) -> Tensor:
    return _forward_fake(r_old, y, c, post, numeric_profile)


def _linked_bwd(d_r_new: Tensor, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor, numeric_profile: str) -> _Gates:
    ops: Any = backend_for(r_old.device.type, numeric_profile)
    if hasattr(ops, "mhc_post_gate_bwd"):
        d_y, d_c, d_post = ops.mhc_post_gate_bwd(d_r_new, r_old, y, c, post)
    else:
        _, d_y, d_c, d_post = ops.mhc_post_bwd(d_r_new, r_old, y, c, post)
    return stored(d_y, BF16), stored(d_c, FP32), stored(d_post, FP32)


def _linked_bwd_fake(
    d_r_new: Tensor, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor, numeric_profile: str
) -> _Gates:
    return y.new_empty(y.shape), c.new_empty(c.shape), post.new_empty(post.shape)


def _linked_formula(ctx: Any, d_r_new: Tensor) -> tuple[Tensor | None, ...]:
    gates = _linked_op_bwd(d_r_new, *ctx.saved_tensors, ctx.numeric_profile)
    # The link's gradient is what arrived, by reference: an operation could only return a copy.
    return needed(ctx, (None, *gates, d_r_new))


_op, _op_bwd = define("mhc_post", _forward, _forward_fake, _backward, _backward_fake)
differentiate(_op, _formula, _keep)
_linked_op, _linked_op_bwd = define("mhc_post_linked", _linked, _linked_fake, _linked_bwd, _linked_bwd_fake)
differentiate(_linked_op, _linked_formula, _keep)
