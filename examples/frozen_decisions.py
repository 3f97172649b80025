"""What each frozen decision is worth: how many elements of a fixture case move when it is taken the other way.

``python examples/frozen_decisions.py`` prints the table that docs/design/dsv4_p1_mhc_rmsnorm_start_kit.md shows.
Every alternative starts from the oracle's own intermediate values, so a count is the effect of that one decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from rl_engine.mhc import oracle
from rl_engine.mhc.bits import differing
from rl_engine.mhc.contract import MHC_EPS, RMSNORM_EPS, GradBoundary, ResidualBatch
from rl_engine.mhc.elementary import ORACLE_PROFILE, PORTABLE_PROFILE, for_profile
from rl_engine.mhc.fixture_inputs import TorchDraws
from rl_engine.mhc.fixtures import make_batch, make_grads, make_rms_edge_inputs, make_sinkhorn_edge_inputs
from rl_engine.mhc.operators import Saved, reference_operators
from rl_engine.mhc.operators.sinkhorn import STEP_KINDS
from rl_engine.mhc.reduction import fixed_sumsq, stream4_max, stream4_sum_dim

EPS = torch.tensor(MHC_EPS)
ELEMENTARY = for_profile(ORACLE_PROFILE)
Tensor = torch.Tensor


class Row(NamedTuple):
    """One alternative: what it replaces, the tensor it moves, and how many of its elements differ."""

    contract: str
    alternative: str
    tensor: str
    moved: int
    total: int


def compared(contract: str, alternative: str, tensor: str, got: Tensor, want: Tensor) -> Row:
    """The row of an alternative whose tensor is ``got`` where the contract has ``want``."""
    return Row(contract, alternative, tensor, int(differing(got, want).sum()), want.numel())


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a*b + c`` of FP32 tensors with one rounding: exact product, sum rounded to odd in FP64, then to FP32."""
    product, addend = torch.broadcast_tensors(a.double() * b.double(), c.double())
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    bits = torch.where((error != 0) & (bits % 2 == 0), bits + step, bits)
    return bits.view(torch.float64).float()


def fold(x: Tensor, w: Tensor, step: Callable[[Tensor, Tensor, Tensor], Tensor], order: range) -> Tensor:
    """``P[T, N]`` of ``x[T, K]`` and ``w[N, K]``, one accumulator, over K in ``order``."""
    acc = torch.zeros(x.shape[0], w.shape[0])
    for k in order:
        acc = step(x[:, k, None], w[None, :, k], acc)
    return acc


def plain(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    """One step of the contract's fold: the product rounds, then the sum."""
    return acc + a * b


def left4(x: Tensor, dim: int) -> Tensor:
    """``((a0 + a1) + a2) + a3``, where the contract pairs."""
    a0, a1, a2, a3 = x.unbind(dim)
    return ((a0 + a1) + a2) + a3


def comb(
    logits: Tensor,
    kinds: tuple[str, ...] = STEP_KINDS,
    shift: bool = True,
    total: Callable[[Tensor, int], Tensor] = stream4_sum_dim,
    guard: Callable[[Tensor], Tensor] = lambda s: s + EPS,
) -> Tensor:
    """``C`` of ``logits[T, 4, 4]`` with one thing changed; with no argument the contract's."""
    top = stream4_max(logits, -1).unsqueeze(-1) if shift else 0.0
    exps = torch.exp(logits - top)
    matrix = exps / total(exps, -1).unsqueeze(-1) + EPS
    for kind in kinds:
        axis = -2 if kind == "col" else -1
        matrix = matrix / guard(total(matrix, axis)).unsqueeze(axis)
    return matrix


def controller_rows(batch: ResidualBatch, saved: Saved) -> Iterator[Row]:
    """Operator 2: the order of the fold, FMA, the RMS scale and its backward."""
    x, w, p, gemm = saved["x_flat"], batch.controller.weight, saved["p"], saved["gemm"]
    k = x.shape[1]
    yield compared("ascending fold", "descending fold", "P", fold(x, w, plain, range(k)[::-1]), p)
    halves = fold(x, w, plain, range(k // 2)) + fold(x, w, plain, range(k // 2, k))
    yield compared("one accumulator", "split K in two", "P", halves, p)
    yield compared("product rounds", "FMA", "P", fold(x, w, lambda a, b, c: fma(a, b, c), range(k)), p)
    yield from scale_rows(f"K={k}", x)
    r = gemm["r"]
    swapped = torch.rsqrt(gemm["s"] / torch.tensor(float(k)) + EPS)
    yield compared("1/(sqrt(mean)+eps)", "rsqrt(mean+eps)", "r", swapped, r)


def scale_rows(where: str, x: Tensor) -> Iterator[Row]:
    """``q`` from ``s`` at some K: the square root of a quotient, and a reciprocal for the constant."""
    k, s = x.shape[1], fixed_sumsq(x)
    root, size = torch.tensor(math.sqrt(k)), torch.tensor(float(k))
    q = torch.sqrt(s) / root
    yield compared("sqrt(s)/sqrt(K)", "sqrt(s/K)", f"q, {where}", torch.sqrt(s / size), q)
    yield compared("divide by sqrt(K)", "times 1/sqrt(K)", f"q, {where}", torch.sqrt(s) * (1 / root), q)


def sinkhorn_rows(saved: Saved) -> Iterator[Row]:
    """Operator 1: the steps, eps, the tree, the shift, and torch's two sigmoids."""
    h, c = saved["h"], saved["c"]
    logits = h[:, 8:].reshape(-1, 4, 4)
    assert not differing(comb(logits), c).any()
    yield compared("39 steps", "37 steps", "C", comb(logits, STEP_KINDS[:-2]), c)
    yield compared("39 steps", "41 steps", "C", comb(logits, (*STEP_KINDS, "row", "col")), c)
    yield compared("column first", "row first, 40 steps", "C", comb(logits, ("row", "col") * 20), c)
    yield compared("sum + eps", "clamp(sum, min=eps)", "C", comb(logits, guard=lambda s: s.clamp(min=MHC_EPS)), c)
    yield compared("(a0+a1)+(a2+a3)", "((a0+a1)+a2)+a3", "C", comb(logits, total=left4), c)
    yield compared("max subtracted", "no shift", "C", comb(logits, shift=False), c)
    sharp = comb(logits * 20)
    yield compared("39 steps", "37 steps", "C, logits * 20", comb(logits * 20, STEP_KINDS[:-2]), sharp)
    edge = make_sinkhorn_edge_inputs()[0][:, 8:].reshape(-1, 4, 4) * 4
    yield compared("max subtracted", "no shift", "C, logits to +-120", comb(edge, shift=False), comb(edge))
    wide = TorchDraws("sigmoid")(4096)
    yield compared("scalar sigmoid", "contiguous call", "sigmoid", torch.sigmoid(wide), ELEMENTARY.sigmoid(wide))


def stream_rows(batch: ResidualBatch, saved: Saved, r_new: Tensor, grads: GradBoundary) -> Iterator[Row]:
    """Operators 3 and 4: the axis of C, the tree, the store."""
    r, c = batch.r_old.float(), saved["c"]
    added = saved["post"][:, :, None] * batch.y_sublayer.float()[:, None, :]

    def post(matrix: Tensor, total: Callable[[Tensor, int], Tensor] = stream4_sum_dim) -> Tensor:
        return total(matrix[:, :, :, None] * r[:, :, None, :], 1) + added

    assert not differing(post(c).bfloat16(), r_new).any()
    transposed = post(c.transpose(1, 2).contiguous()).bfloat16()
    yield compared("C takes i into j", "C transposed", "r_new", transposed, r_new)
    yield compared("(a0+a1)+(a2+a3)", "((a0+a1)+a2)+a3", "r_new", post(c, left4).bfloat16(), r_new)
    g = grads.d_r_new.float()
    d_r = left4(c[:, :, :, None] * g[:, None, :, :], 2)
    want = oracle.mhc_post_bwd(grads.d_r_new, batch.r_old, batch.y_sublayer, c, saved["post"])[0]
    yield compared("(a0+a1)+(a2+a3)", "((a0+a1)+a2)+a3", "dR of post", d_r, want)
    truncated = (post(c).view(torch.int32) & -65536).view(torch.float32).bfloat16()
    yield compared("store rounds to even", "store truncates", "r_new", truncated, r_new)
    mixed = stream4_sum_dim(c[:, :, :, None] * r[:, :, None, :], 1).bfloat16().float()
    yield compared("one rounding to BF16", "mix rounded too", "r_new", (mixed + added).bfloat16(), r_new)


def norm_rows(batch: ResidualBatch, saved: Saved) -> Iterator[Row]:
    """Operator 5: where BF16 is rounded to, which eps, and what fusing may not skip."""
    hidden, want, gamma = saved["hidden"].float(), saved["normalized"], batch.norm.gamma.float()
    r, d = saved["norm"]["r"], torch.tensor(float(batch.hidden))

    def scaled(x: Tensor, scale: Tensor) -> Tensor:
        return ((x * scale[:, None]) * gamma).bfloat16()

    assert not differing(scaled(hidden, r), want).any()
    early = ((hidden * r[:, None]).bfloat16().float() * gamma).bfloat16()
    yield compared("cast after gamma", "cast before gamma", "normalized", early, want)
    products: Tensor = saved["pre"][:, :, None] * batch.r_old.float()
    unrounded = stream4_sum_dim(products, 1)
    skipped = scaled(unrounded, torch.rsqrt(fixed_sumsq(unrounded) / d + EPS))
    yield compared("norm reads BF16 hidden", "norm reads FP32 hidden", "normalized", skipped, want)
    x, edge_gamma, _, _ = make_rms_edge_inputs()
    y, _, _ = oracle.rmsnorm_residual_fwd(x, edge_gamma, RMSNORM_EPS)
    mean = fixed_sumsq(x.float()) / d
    other = ((x.float() * (1 / (torch.sqrt(mean) + EPS))[:, None]) * edge_gamma.float()).bfloat16()
    yield compared("rsqrt(mean+eps)", "1/(sqrt(mean)+eps)", "y, rms_edges", other, y)


def profile_rows(batch: ResidualBatch, saved: Saved) -> Iterator[Row]:
    """The same inputs under the portable profile, operator by operator."""
    portable, alike = reference_operators(PORTABLE_PROFILE), ("torch's functions", "correctly rounded ones")
    _, r, _ = portable.fp32_gemm_rms_fwd(saved["x_flat"], batch.controller.weight, MHC_EPS)
    pre, _, c, _ = portable.hc_split_sinkhorn_fwd(saved["h"])
    _, _, norm = portable.rmsnorm_residual_fwd(saved["hidden"], batch.norm.gamma, RMSNORM_EPS)
    yield compared(*alike, "r of gemm_rms", r, saved["r"])
    yield compared(*alike, "PRE", pre, saved["pre"])
    yield compared(*alike, "C", c, saved["c"])
    yield compared(*alike, "r of RMSNorm", norm["r"], saved["norm"]["r"])


def backward_rows(batch: ResidualBatch, saved: Saved, grads: GradBoundary) -> Iterator[Row]:
    """The guard of the RMS backward, and FP32 gradients between operators."""
    x, gemm, dp, dr = saved["x_flat"], saved["gemm"], TorchDraws("dp")(batch.tokens, 24), TorchDraws("dr")(batch.tokens)
    want, _ = oracle.fp32_gemm_rms_bwd(dp, dr, x, batch.controller.weight, gemm)
    k, q, r = torch.tensor(float(x.shape[1])), gemm["q"], gemm["r"]
    zero, _ = oracle.fp32_gemm_rms_bwd(dp, torch.zeros_like(dr), x, batch.controller.weight, gemm)
    leg = dr[:, None] * ((-(r * r))[:, None] * x / (k * (q + EPS))[:, None])
    yield compared("divide by K*q", "divide by K*(q+eps)", "dX of gemm_rms", zero + leg, want)
    blank = torch.zeros(1, x.shape[1])
    _, _, blank_saved = oracle.fp32_gemm_rms_fwd(blank, batch.controller.weight, MHC_EPS)
    want, _ = oracle.fp32_gemm_rms_bwd(dp[:1], dr[:1], blank, batch.controller.weight, blank_saved)
    unguarded = dr[:1, None] * (-(blank_saved["r"] ** 2)[:, None] * blank / (k * blank_saved["q"])[:, None])
    yield compared("q == 0 divides by 1", "no guard", "dX, a zero row", zero[:1] + unguarded, want)
    result = oracle.mhc_block_backward(batch, saved, grads)
    d_hidden, d_r_old = result["d_hidden"], result["d_r_old"]
    assert d_hidden is not None and d_r_old is not None
    d_r_post = oracle.mhc_post_bwd(grads.d_r_new, batch.r_old, batch.y_sublayer, saved["c"], saved["post"])
    pre = oracle.mhc_pre_bwd(d_hidden.bfloat16(), d_r_post[3], d_r_post[2], batch, saved)["d_r_old"]
    assert pre is not None
    yield compared("FP32 d_hidden", "BF16 d_hidden", "d_r_old", pre + d_r_post[0], d_r_old)


def rows() -> list[Row]:
    """All rows, on ``packed_t16`` (T=16, D=128, K=512) unless the row says otherwise."""
    batch = make_batch("packed_t16")
    r_new, saved = oracle.mhc_block_forward(batch)
    parts = [controller_rows(batch, saved)]
    for hidden in (4096, 7168):
        parts.append(scale_rows(f"K={4 * hidden}", TorchDraws(f"scale.{hidden}")(16, 4 * hidden).bfloat16().float()))
    grads = make_grads("packed_t16", batch)
    parts += [sinkhorn_rows(saved), stream_rows(batch, saved, r_new, grads), norm_rows(batch, saved)]
    parts += [backward_rows(batch, saved, grads), profile_rows(batch, saved)]
    return [row for part in parts for row in part]


if __name__ == "__main__":
    print("| the contract | the alternative | tensor | elements that differ |")
    print("|---|---|---|---|")
    for row in rows():
        print(f"| {row.contract} | {row.alternative} | {row.tensor} | {row.moved} of {row.total} |")
