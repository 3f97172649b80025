"""The six operators over nested lists of `F32`, one rounded operation at a time.

Shapes are written as in the specification; a tensor [T, D] is a list of T lists. Long reductions are `fold` (one
FP32 accumulator from +0, ascending), reductions over the four streams are `tree4`. Gradients and controller values
stay FP32; `round_bf16` appears exactly where an operator stores its output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .scalar import F32, ONE, TWO, ZERO, Elementary, maximum, round_bf16, round_f32, sqrt_f32

Vector = list[F32]
Matrix = list[Vector]
Cube = list[Matrix]

STREAMS = range(4)
EPS = round_f32(Fraction(1, 10**6))
STEP_KINDS = ["col", *(["row", "col"] * 19)]


def fold(terms: Iterable[F32]) -> F32:
    total = ZERO
    for term in terms:
        total = total + term
    return total


def dot(a: Sequence[F32], b: Sequence[F32]) -> F32:
    return fold(x * y for x, y in zip(a, b, strict=True))


def tree4(terms: Sequence[F32]) -> F32:
    a0, a1, a2, a3 = terms
    return (a0 + a1) + (a2 + a3)


def tree4_max(terms: Sequence[F32]) -> F32:
    a0, a1, a2, a3 = terms
    return maximum(maximum(a0, a1), maximum(a2, a3))


def columns(m: Matrix, width: int) -> Matrix:
    """The transpose; `width` keeps the columns of a matrix without rows."""
    return [[row[j] for row in m] for j in range(width)]


# --- 1. hc_split_sinkhorn -------------------------------------------------------------------------------------------


@dataclass
class Step:
    kind: str
    m_in: Matrix  # [4, 4]
    den: Vector  # [4], eps included; indexed by the axis that stays


@dataclass
class Split:
    """One row of hc_split_sinkhorn: outputs, then what the backward needs."""

    pre: Vector
    post: Vector
    c: Matrix
    sig_pre: Vector
    sig_post: Vector
    softmax: Matrix
    steps: list[Step]


def softmax4(logits: Vector, fn: Elementary) -> Vector:
    top = tree4_max(logits)
    exps = [fn.exp(v - top) for v in logits]
    total = tree4(exps)
    return [e / total for e in exps]


def normalize_step(kind: str, m: Matrix) -> tuple[Matrix, Vector]:
    if kind == "col":
        den = [tree4([m[i][j] for i in STREAMS]) + EPS for j in STREAMS]
        return [[m[i][j] / den[j] for j in STREAMS] for i in STREAMS], den
    den = [tree4(m[i]) + EPS for i in STREAMS]
    return [[m[i][j] / den[i] for j in STREAMS] for i in STREAMS], den


def normalize_step_bwd(step: Step, dn: Matrix) -> Matrix:
    products = [[dn[i][j] * step.m_in[i][j] for j in STREAMS] for i in STREAMS]
    if step.kind == "col":
        g = [tree4([products[i][j] for i in STREAMS]) for j in STREAMS]
    else:
        g = [tree4(products[i]) for i in STREAMS]

    def entry(i: int, j: int) -> F32:
        axis = j if step.kind == "col" else i
        den = step.den[axis]
        return dn[i][j] / den - g[axis] / (den * den)

    return [[entry(i, j) for j in STREAMS] for i in STREAMS]


def split_sinkhorn_row(h: Vector, fn: Elementary) -> Split:
    sig_pre = [fn.sigmoid(v) for v in h[0:4]]
    sig_post = [fn.sigmoid(v) for v in h[4:8]]
    softmax = [softmax4(h[8 + 4 * i : 12 + 4 * i], fn) for i in STREAMS]
    m = [[s + EPS for s in row] for row in softmax]
    steps = []
    for kind in STEP_KINDS:
        out, den = normalize_step(kind, m)
        steps.append(Step(kind, m, den))
        m = out
    pre = [s + EPS for s in sig_pre]
    post = [TWO * s for s in sig_post]
    return Split(pre, post, m, sig_pre, sig_post, softmax, steps)


def split_sinkhorn_bwd_row(dpre: Vector, dpost: Vector, dc: Matrix, saved: Split) -> Vector:
    dm = dc
    for step in reversed(saved.steps):
        dm = normalize_step_bwd(step, dm)
    dlogits: Vector = []
    for dm_row, s_row in zip(dm, saved.softmax, strict=True):
        inner = tree4([d * s for d, s in zip(dm_row, s_row, strict=True)])
        dlogits += [s * (d - inner) for d, s in zip(dm_row, s_row, strict=True)]
    dh_pre = [d * (s * (ONE - s)) for d, s in zip(dpre, saved.sig_pre, strict=True)]
    dh_post = [d * (TWO * (s * (ONE - s))) for d, s in zip(dpost, saved.sig_post, strict=True)]
    return dh_pre + dh_post + dlogits


# --- 2. fp32_gemm_rms -----------------------------------------------------------------------------------------------


@dataclass
class GemmRms:
    p: Matrix  # [T, N]
    r: Vector  # [T]
    s: Vector
    norm: Vector
    q: Vector
    mean: Vector | None = None  # under rsqrt-mean-plus-eps, which has no norm and no q


def gemm_rms_fwd(x: Matrix, weight: Matrix, eps: F32, fn: Elementary, *, released: bool = False) -> GemmRms:
    root_k = sqrt_f32(len(weight[0]))
    p = [[dot(row, w) for w in weight] for row in x]
    s = [dot(row, row) for row in x]
    if released:
        mean = [v / round_f32(len(weight[0])) + eps for v in s]
        return GemmRms(p, [fn.rsqrt(v) for v in mean], s, [], [], mean)
    norm = [fn.sqrt(v) for v in s]
    q = [v / root_k for v in norm]
    r = [ONE / (v + eps) for v in q]
    return GemmRms(p, r, s, norm, q)


def gemm_rms_bwd(dp: Matrix, dr: Vector, x: Matrix, weight: Matrix, saved: GemmRms) -> tuple[Matrix, Matrix]:
    k = len(weight[0])
    dx = []
    for t, row in enumerate(x):
        r = saved.r[t]
        if saved.mean is None:
            slope, scale = -(r * r), ONE if saved.q[t].is_zero else round_f32(k) * saved.q[t]
        else:
            slope, scale = -((r * r) * r), round_f32(k)
        leg = [dr[t] * ((slope * v) / scale) for v in row]
        gemm = [dot(dp[t], w_column) for w_column in columns(weight, k)]
        dx.append([a + b for a, b in zip(gemm, leg, strict=True)])
    x_columns = columns(x, k)
    dw = [[dot(dp_column, x_column) for x_column in x_columns] for dp_column in columns(dp, len(weight))]
    return dx, dw


# --- 3. mhc_post ----------------------------------------------------------------------------------------------------


def post_fwd_row(r_old: Matrix, y: Vector, c: Matrix, post: Vector) -> Matrix:
    def entry(j: int, d: int) -> F32:
        return tree4([c[i][j] * r_old[i][d] for i in STREAMS]) + (post[j] * y[d])

    return [[round_bf16(entry(j, d)) for d in range(len(y))] for j in STREAMS]


@dataclass
class PostGrads:
    """One row of mhc_post's backward."""

    dr_old: Matrix
    dy: Vector
    dc: Matrix
    dpost: Vector


def post_bwd_row(g: Matrix, r_old: Matrix, y: Vector, c: Matrix, post: Vector) -> PostGrads:
    width = range(len(y))
    return PostGrads(
        dr_old=[[tree4([c[i][j] * g[j][d] for j in STREAMS]) for d in width] for i in STREAMS],
        dy=[tree4([post[j] * g[j][d] for j in STREAMS]) for d in width],
        dc=[[dot(r_old[i], g[j]) for j in STREAMS] for i in STREAMS],
        dpost=[dot(y, g[j]) for j in STREAMS],
    )


# --- 4. h_aggregate -------------------------------------------------------------------------------------------------


def aggregate_fwd_row(pre: Vector, r_old: Matrix) -> Vector:
    width = range(len(r_old[0]))
    return [round_bf16(tree4([pre[i] * r_old[i][d] for i in STREAMS])) for d in width]


def aggregate_bwd_row(dh: Vector, pre: Vector, r_old: Matrix) -> tuple[Matrix, Vector]:
    dr = [[pre[i] * v for v in dh] for i in STREAMS]
    dpre = [dot(dh, r_old[i]) for i in STREAMS]
    return dr, dpre


# --- 5. rmsnorm_residual --------------------------------------------------------------------------------------------


@dataclass
class RmsNorm:
    y: Matrix  # [T, D]
    r: Vector  # [T]


def rmsnorm_fwd(x: Matrix, gamma: Vector, eps: F32, fn: Elementary) -> RmsNorm:
    """The residual output is x itself."""
    d = round_f32(len(gamma))
    r = [fn.rsqrt(dot(row, row) / d + eps) for row in x]
    y = [
        [round_bf16((v * scale) * g) for v, g in zip(row, gamma, strict=True)] for row, scale in zip(x, r, strict=True)
    ]
    return RmsNorm(y, r)


def rmsnorm_bwd(dy: Matrix, d_residual: Matrix, x: Matrix, gamma: Vector, saved_r: Vector) -> tuple[Matrix, Vector]:
    d = round_f32(len(gamma))
    dx = []
    for t, row in enumerate(x):
        r = saved_r[t]
        u = [a * g for a, g in zip(dy[t], gamma, strict=True)]
        q = dot(u, row)
        cube = (r * r) * r
        dx.append([(r * u[k] - ((v * cube) * q) / d) + d_residual[t][k] for k, v in enumerate(row)])
    dgamma = [fold((dy[t][k] * x[t][k]) * saved_r[t] for t in range(len(x))) for k in range(len(gamma))]
    return dx, dgamma


# --- 6. fixed_k_gemm ------------------------------------------------------------------------------------------------


def fixed_gemm_fwd(x: Matrix, w: Matrix) -> Matrix:
    return [[dot(row, w_row) for w_row in w] for row in x]


def fixed_gemm_bwd(dy: Matrix, x: Matrix, w: Matrix) -> tuple[Matrix, Matrix]:
    w_columns, x_columns = columns(w, len(w[0])), columns(x, len(w[0]))
    dx = [[dot(dy_row, w_column) for w_column in w_columns] for dy_row in dy]
    dw = [[dot(dy_column, x_column) for x_column in x_columns] for dy_column in columns(dy, len(w))]
    return dx, dw
