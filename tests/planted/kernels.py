"""The twelve leaf operators in plain torch, written from the contract, with a hook at every place a kernel gets wrong.

With the default hooks each is right byte for byte (``honest.py`` is made of them, and passes), so a defect planted
through one hook is that defect and nothing else. Nothing here calls the reference.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.planted.arithmetic import Fold, Store, Tree, ascending, constant, nearest_even, tree4

Saved = dict[str, Any]
EPS = 1e-6


def kernel(function: Callable[..., Any], **hooks: Any) -> Callable[..., Any]:
    """A method that runs ``function`` with those hooks and has the signature of the operator, without them."""
    declared = inspect.signature(function)
    positional = [p for p in declared.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    @functools.wraps(function)
    def method(self: object, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs, **hooks)

    vars(method)["__signature__"] = declared.replace(parameters=[self, *positional])
    return method


# --- operator 1 ---

STEPS = ("col",) + ("row", "col") * 19
AXIS = {"col": 1, "row": 2}


def sigmoid(x: Tensor) -> Tensor:
    """torch's, on an inner-strided view."""
    return torch.sigmoid(torch.stack((x, x), dim=-1)[..., 0])


def softmax(logits: Tensor) -> Tensor:
    a = logits.unbind(-1)
    top = torch.maximum(torch.maximum(a[0], a[1]), torch.maximum(a[2], a[3]))
    exps = torch.exp(logits - top[..., None])
    return exps / tree4(exps.unbind(-1))[..., None]


def plus_eps(x: Tensor, eps: float = EPS) -> Tensor:
    return x + constant(eps, x)


def twice(x: Tensor) -> Tensor:
    return x * constant(2.0, x)


def hc_split_sinkhorn_fwd(
    h: Tensor,
    contract: Any = None,
    *,
    pre: Store = plus_eps,
    post: Store = twice,
    soft: Store = softmax,
    lift: Store = plus_eps,
    bound: Store = plus_eps,
    steps: tuple[str, ...] = STEPS,
    sig: Store = sigmoid,
    tree: Tree = tree4,
) -> tuple[Tensor, Tensor, Tensor, Saved]:
    sig_pre, sig_post = sig(h[:, :4]), sig(h[:, 4:8])
    s = soft(h[:, 8:].reshape(len(h), 4, 4))
    m, walked = lift(s), []
    for kind in steps:
        denominator = bound(tree(m.unbind(AXIS[kind])))
        walked.append((kind, m, denominator))
        m = m / denominator.unsqueeze(AXIS[kind])
    saved = {"sig_pre": sig_pre, "sig_post": sig_post, "softmax": s, "steps": walked, "eps": EPS}
    return pre(sig_pre), post(sig_post), m, saved


def hc_split_sinkhorn_bwd(
    dpre: Tensor, dpost: Tensor, dc: Tensor, saved: Saved, *, last: int | None = None, factor: float = 2.0
) -> Tensor:
    one, d = constant(1.0, dc), dc
    for kind, m, den in list(reversed(saved["steps"]))[:last]:
        g = tree4((d * m).unbind(AXIS[kind]))
        d = d / den.unsqueeze(AXIS[kind]) - (g / (den * den)).unsqueeze(AXIS[kind])
    s, sig_pre, sig_post = saved["softmax"], saved["sig_pre"], saved["sig_post"]
    dlogits = s * (d - tree4((d * s).unbind(2))[..., None])
    dh_post = dpost * (constant(factor, dc) * (sig_post * (one - sig_post)))
    return torch.cat((dpre * (sig_pre * (one - sig_pre)), dh_post, dlogits.reshape(len(dc), 16)), dim=1)


# --- operator 2 ---


def inverse_rms(s: Tensor, k: int, eps: float = EPS) -> tuple[Tensor, Tensor, Tensor]:
    """``norm, q, r`` of the sums of squares."""
    norm = torch.sqrt(s)
    q = norm / constant(math.sqrt(k), s)
    return norm, q, constant(1.0, s) / plus_eps(q, eps)


def fp32_gemm_rms_fwd(
    x_flat: Tensor,
    weight: Tensor,
    eps: float,
    *,
    fold: Fold = ascending,
    squares: Fold = ascending,
    scale: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor, Saved]:
    x, k = x_flat.float().t().contiguous(), x_flat.shape[1]
    p = fold(x[:, :, None], weight.t().contiguous()[:, None, :])
    s = squares(x, x)
    norm, q, r = scale(s, k) if scale is not None else inverse_rms(s, k, eps)
    return p, r, {"s": s, "norm": norm, "q": q, "r": r, "k": k}


def zero_safe(k_times_q: Tensor, q: Tensor) -> Tensor:
    return torch.where(q == 0, constant(1.0, q), k_times_q)


def fp32_gemm_rms_bwd(
    dp: Tensor,
    dr: Tensor,
    x_flat: Tensor,
    weight: Tensor,
    saved: Saved,
    *,
    over_n: Fold = ascending,
    over_t: Fold = ascending,
    guard: Callable[[Tensor, Tensor], Tensor] = zero_safe,
) -> tuple[Tensor, Tensor]:
    x, r, q = x_flat.float(), saved["r"], saved["q"]
    gemm = over_n(dp.t()[:, :, None], weight[:, None, :])
    denominator = guard(constant(x.shape[1], q) * q, q)
    rms = dr[:, None] * (((-(r * r))[:, None] * x) / denominator[:, None])
    return gemm + rms, over_t(dp[:, :, None], x[:, None, :])


# --- operator 3 ---


def mhc_post_fwd(
    r_old: Tensor, y: Tensor, c: Tensor, post: Tensor, *, tree: Tree = tree4, store: Store = nearest_even
) -> Tensor:
    mixed = tree([c[:, i, :, None] * r_old[:, i, None, :].float() for i in range(4)])
    return store(mixed + post[:, :, None] * y[:, None, :].float())


def mhc_post_bwd(
    dr_new: Tensor,
    r_old: Tensor,
    y: Tensor,
    c: Tensor,
    post: Tensor,
    *,
    tree: Tree = tree4,
    comb_fold: Fold = ascending,
    post_fold: Fold = ascending,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g, r, y32 = dr_new.float(), r_old.float(), y.float()
    d_r = tree([c[:, :, j, None] * g[:, j, None, :] for j in range(4)])
    dy = tree([post[:, j, None] * g[:, j, :] for j in range(4)])
    by_d = g.permute(2, 0, 1).contiguous()
    d_c = comb_fold(r.permute(2, 0, 1).contiguous()[..., None], by_d[:, :, None, :])
    d_post = post_fold(y32.t().contiguous()[..., None], by_d)
    return d_r, dy, d_c, d_post


# --- operator 4 ---


def h_aggregate_fwd(pre: Tensor, r_old: Tensor, *, tree: Tree = tree4, store: Store = nearest_even) -> Tensor:
    return store(tree([pre[:, i, None] * r_old[:, i].float() for i in range(4)]))


def h_aggregate_bwd(dh: Tensor, pre: Tensor, r_old: Tensor, *, fold: Fold = ascending) -> tuple[Tensor, Tensor]:
    g = dh.float()
    d_pre = fold(g.t().contiguous()[..., None], r_old.float().permute(2, 0, 1).contiguous())
    return pre[:, :, None] * g[:, None, :], d_pre


# --- operator 5 ---


def inverse_root(s: Tensor, d: int, eps: float = EPS) -> Tensor:
    return torch.rsqrt(plus_eps(s / constant(d, s), eps))


def scaled_then_weighted(x: Tensor, r: Tensor, gamma: Tensor) -> Tensor:
    return (x * r) * gamma.float()


def divided(x: Tensor, d: int) -> Tensor:
    return x / constant(d, x)


def rmsnorm_residual_fwd(
    x: Tensor,
    gamma: Tensor,
    eps: float,
    *,
    fold: Fold = ascending,
    scale: Callable[[Tensor, int], Tensor] | None = None,
    apply: Callable[[Tensor, Tensor, Tensor], Tensor] = scaled_then_weighted,
    store: Store = nearest_even,
) -> tuple[Tensor, Tensor, Saved]:
    x32, d = x.float(), x.shape[1]
    by_d = x32.t().contiguous()
    s = fold(by_d, by_d)
    r = scale(s, d) if scale is not None else inverse_root(s, d, eps)
    return store(apply(x32, r[:, None], gamma)), x.clone(), {"r": r, "x32": x32, "d": d}


def rmsnorm_residual_bwd(
    dy: Tensor,
    d_residual: Tensor,
    x: Tensor,
    gamma: Tensor,
    saved: Saved,
    *,
    over_d: Fold = ascending,
    over_t: Fold = ascending,
    mean: Callable[[Tensor, int], Tensor] = divided,
    residual_leg: Store = Tensor.float,
) -> tuple[Tensor, Tensor]:
    x32, g, r = x.float(), dy.float(), saved["r"][:, None]
    u = g * gamma.float()
    q = over_d(u.t().contiguous(), x32.t().contiguous())[:, None]
    pull = mean((x32 * ((r * r) * r)) * q, x.shape[1])
    return (r * u) - pull + residual_leg(d_residual), over_t(g * x32, r)


# --- operator 6 ---


def fixed_k_gemm_fwd(x: Tensor, w: Tensor, *, fold: Fold = ascending) -> Tensor:
    return fold(x.float().t()[:, :, None], w.float().t()[:, None, :])


def fixed_k_gemm_bwd(
    dy: Tensor, x: Tensor, w: Tensor, *, over_n: Fold = ascending, over_m: Fold = ascending
) -> tuple[Tensor, Tensor]:
    g, x32, w32 = dy.float(), x.float(), w.float()
    return over_n(g.t()[:, :, None], w32[:, None, :]), over_m(g[:, :, None], x32[:, None, :])
