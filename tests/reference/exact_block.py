"""The composites `mhc_pre` and the whole block, forward and backward, over the exact operators."""

from __future__ import annotations

from dataclasses import dataclass

from .exact import (
    EPS,
    Cube,
    GemmRms,
    Matrix,
    PostGrads,
    RmsNorm,
    Split,
    Vector,
    aggregate_bwd_row,
    aggregate_fwd_row,
    dot,
    fold,
    gemm_rms_bwd,
    gemm_rms_fwd,
    post_bwd_row,
    post_fwd_row,
    rmsnorm_bwd,
    rmsnorm_fwd,
    split_sinkhorn_bwd_row,
    split_sinkhorn_row,
)
from .scalar import F32, Elementary

SEGMENTS = {"pre": range(0, 4), "post": range(4, 8), "res": range(8, 24)}


@dataclass
class BlockInput:
    """r_old [T, 4, D], y [T, D], weight [24, 4D], three alphas, bias [24], gamma [D]."""

    r_old: Cube
    y: Matrix
    weight: Matrix
    alpha_pre: F32
    alpha_post: F32
    alpha_res: F32
    bias: Vector
    gamma: Vector

    @property
    def alpha(self) -> Vector:
        return [self.alpha_pre] * 4 + [self.alpha_post] * 4 + [self.alpha_res] * 16


@dataclass
class Pre:
    """mhc_pre's outputs and saved values."""

    x_flat: Matrix
    gemm: GemmRms
    m: Matrix
    h: Matrix
    split: list[Split]
    hidden: Matrix


@dataclass
class ControllerGrads:
    weight: Matrix
    alpha_pre: F32
    alpha_post: F32
    alpha_res: F32
    bias: Vector


@dataclass
class Block:
    pre: Pre
    norm: RmsNorm
    r_new: Cube


@dataclass
class BlockGrads:
    d_r_old: Cube
    dy_sublayer: Matrix
    d_hidden: Matrix
    d_gamma: Vector
    d_c: Cube
    d_post: Matrix
    controller: ControllerGrads


def pre_fwd(b: BlockInput, fn: Elementary, *, released: bool = False) -> Pre:
    x_flat = [[value for stream in token for value in stream] for token in b.r_old]
    gemm = gemm_rms_fwd(x_flat, b.weight, EPS, fn, released=released)
    m = [[r * p for p in row] for r, row in zip(gemm.r, gemm.p, strict=True)]
    h = [[v * a + bias for v, a, bias in zip(row, b.alpha, b.bias, strict=True)] for row in m]
    split = [split_sinkhorn_row(row, fn) for row in h]
    hidden = [aggregate_fwd_row(s.pre, token) for s, token in zip(split, b.r_old, strict=True)]
    return Pre(x_flat, gemm, m, h, split, hidden)


def pre_bwd(dhidden: Matrix, dpost: Matrix, dc: Cube, b: BlockInput, saved: Pre) -> tuple[Cube, ControllerGrads]:
    tokens = range(len(b.r_old))
    aggregate = [aggregate_bwd_row(dhidden[t], saved.split[t].pre, b.r_old[t]) for t in tokens]
    dh = [split_sinkhorn_bwd_row(aggregate[t][1], dpost[t], dc[t], saved.split[t]) for t in tokens]
    dalpha = [fold(dh[t][n] * saved.m[t][n] for t in tokens) for n in range(24)]
    dm = [[v * a for v, a in zip(row, b.alpha, strict=True)] for row in dh]
    dp = [[v * saved.gemm.r[t] for v in dm[t]] for t in tokens]
    dr = [dot(dm[t], saved.gemm.p[t]) for t in tokens]
    dx, dw = gemm_rms_bwd(dp, dr, saved.x_flat, b.weight, saved.gemm)
    width = len(b.gamma)
    d_r_old = [[[aggregate[t][0][i][d] + dx[t][i * width + d] for d in range(width)] for i in range(4)] for t in tokens]
    controller = ControllerGrads(
        weight=dw,
        alpha_pre=fold(dalpha[n] for n in SEGMENTS["pre"]),
        alpha_post=fold(dalpha[n] for n in SEGMENTS["post"]),
        alpha_res=fold(dalpha[n] for n in SEGMENTS["res"]),
        bias=[fold(dh[t][n] for t in tokens) for n in range(24)],
    )
    return d_r_old, controller


def block_fwd(b: BlockInput, fn: Elementary, *, released: bool = False) -> Block:
    pre = pre_fwd(b, fn, released=released)
    norm = rmsnorm_fwd(pre.hidden, b.gamma, EPS, fn)
    r_new = [
        post_fwd_row(token, y, split.c, split.post) for token, y, split in zip(b.r_old, b.y, pre.split, strict=True)
    ]
    return Block(pre, norm, r_new)


def block_bwd(d_r_new: Cube, d_normalized: Matrix, d_residual: Matrix, b: BlockInput, saved: Block) -> BlockGrads:
    tokens = range(len(b.r_old))
    post: list[PostGrads] = [
        post_bwd_row(d_r_new[t], b.r_old[t], b.y[t], saved.pre.split[t].c, saved.pre.split[t].post) for t in tokens
    ]
    d_hidden, d_gamma = rmsnorm_bwd(d_normalized, d_residual, saved.pre.hidden, b.gamma, saved.norm.r)
    d_c, d_post = [p.dc for p in post], [p.dpost for p in post]
    from_pre, controller = pre_bwd(d_hidden, d_post, d_c, b, saved.pre)
    d_r_old = [
        [
            [a + c for a, c in zip(pre_row, post_row, strict=True)]
            for pre_row, post_row in zip(from_pre[t], post[t].dr_old, strict=True)
        ]
        for t in tokens
    ]
    return BlockGrads(d_r_old, [p.dy for p in post], d_hidden, d_gamma, d_c, d_post, controller)
