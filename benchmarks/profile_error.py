"""The error of every boundary of the block against an FP64 evaluation, under both numeric profiles, on the same inputs.

    python benchmarks/profile_error.py [--hidden D ...] [--tokens T] [--markdown]

The FP64 evaluation takes the stored inputs as they are, has no rounding of its own that matters, and its gradients are
autograd's. It reads ``hidden`` as the profile stored it, so that the norm is judged for what it does and not for its
input. ``max`` is the largest error over the largest magnitude of the tensor, ``RMS`` the root mean square of the error
over that of the tensor. A BF16 boundary shows its one rounding, 2^-9 at most for one element.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rl_engine.mhc.block import forward_boundaries, mhc_block_backward, mhc_block_forward
from rl_engine.mhc.contract import (
    HC_MULT,
    MHC_EPS,
    RMSNORM_EPS,
    SINKHORN_ITERS,
    GradBoundary,
    LayerContract,
    ResidualBatch,
)
from rl_engine.mhc.elementary import ORACLE_PROFILE, PORTABLE_PROFILE
from rl_engine.mhc.fixture_inputs import draw_batch, draw_grads
from rl_engine.mhc.trace import BACKWARD_BOUNDARIES, FORWARD_BOUNDARIES

PROFILES = (ORACLE_PROFILE, PORTABLE_PROFILE)
BACKWARD = tuple(name for name in BACKWARD_BOUNDARIES if not name.startswith("bwd.d_stream"))
PARAMETERS = tuple(f"grad.{p}" for p in ("d_controller_weight", "d_alpha_pre", "d_alpha_post", "d_alpha_res", "d_bias"))
Tensor = torch.Tensor
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Error:
    """How far one boundary is from FP64, by profile."""

    boundary: str
    dtype: str
    largest: dict[str, float]
    rms: dict[str, float]


def inputs(hidden: int, tokens: int) -> tuple[ResidualBatch, GradBoundary]:
    """A batch and gradients drawn the portable way: the same numbers on every machine, and for both profiles."""
    contract = LayerContract(hidden=hidden, numeric_profile=PORTABLE_PROFILE)
    batch = draw_batch(f"profile_error.{hidden}", tokens, contract)
    return batch, draw_grads(f"profile_error.{hidden}", batch)


def under(batch: ResidualBatch, profile: str) -> ResidualBatch:
    """The same tensors under another profile."""
    contract = batch.contract.with_mode("numeric_profile", profile)
    return dataclasses.replace(batch, contract=contract, weight_fingerprint="")


def computed(batch: ResidualBatch, grads: GradBoundary) -> Tensors:
    """Every boundary as the oracle of the batch's profile computes it."""
    r_new, saved = mhc_block_forward(batch)
    found = dict(forward_boundaries(saved, r_new))
    for key, gradient in mhc_block_backward(batch, saved, grads).items():
        if gradient is not None:
            found[f"bwd.{key}" if f"bwd.{key}" in BACKWARD else f"grad.{key}"] = gradient
    return found | {f"bwd.d_stream{i}": found["bwd.d_r_old"][:, i] for i in range(HC_MULT)}


def sinkhorn(logits: Tensor) -> Tensor:
    """C[T, 4, 4]: softmax and 39 normalizations."""
    m = torch.softmax(logits, dim=-1) + MHC_EPS
    m = m / (m.sum(dim=1, keepdim=True) + MHC_EPS)
    for _ in range(SINKHORN_ITERS - 1):
        m = m / (m.sum(dim=2, keepdim=True) + MHC_EPS)
        m = m / (m.sum(dim=1, keepdim=True) + MHC_EPS)
    return m


def exact(batch: ResidualBatch, grads: GradBoundary, stored_hidden: Tensor) -> Tensors:
    """The same boundaries in FP64; ``stored_hidden`` is the value that the norm reads."""
    controller = batch.controller
    parts = (batch.r_old, batch.y_sublayer, controller.weight, controller.bias, batch.norm.gamma, *controller.alphas)
    leaves = [t.double().requires_grad_() for t in parts]
    r_old, y, weight, bias, gamma, *alphas = leaves
    x = r_old.flatten(1)
    p = x @ weight.T
    r = 1 / (x.square().mean(dim=-1).sqrt() + MHC_EPS)
    alpha = torch.cat([a.expand(n) for a, n in zip(alphas, (HC_MULT, HC_MULT, HC_MULT**2), strict=True)])
    h = r[:, None] * p * alpha + bias
    pre, post = torch.sigmoid(h[:, :4]) + MHC_EPS, 2 * torch.sigmoid(h[:, 4:8])
    c = sinkhorn(h[:, 8:].reshape(-1, HC_MULT, HC_MULT))
    hidden = torch.einsum("ti,tid->td", pre, r_old)
    read = hidden + (stored_hidden.double() - hidden).detach()
    normalized = read / (read.square().mean(dim=-1, keepdim=True) + RMSNORM_EPS).sqrt() * gamma
    r_new = torch.einsum("tij,tid->tjd", c, r_old) + torch.einsum("tj,td->tjd", post, y)
    arriving = [g.double() for g in (grads.d_r_new, grads.d_normalized, grads.d_residual)]
    wanted = [y, c, post, read, gamma, r_old, weight, *alphas, bias]
    found = torch.autograd.grad([r_new, normalized, read], wanted, arriving)
    forward = (p, r, h, pre, post, c, hidden, normalized, read, r_new)
    result = {name: t.detach() for name, t in zip(FORWARD_BOUNDARIES, forward, strict=True)}
    result |= zip((*BACKWARD, *PARAMETERS), found, strict=True)
    return result | {f"bwd.d_stream{i}": result["bwd.d_r_old"][:, i] for i in range(HC_MULT)}


def errors(hidden: int, tokens: int) -> list[Error]:
    """Every boundary, both profiles, one width."""
    batch, grads = inputs(hidden, tokens)
    got = {profile: computed(under(batch, profile), grads) for profile in PROFILES}
    want = {profile: exact(batch, grads, got[profile]["pre.hidden"]) for profile in PROFILES}
    rows = []
    for name, tensor in got[ORACLE_PROFILE].items():
        largest, rms = {}, {}
        for profile in PROFILES:
            reference = want[profile][name]
            difference = got[profile][name].double() - reference
            largest[profile] = float(difference.abs().max() / reference.abs().max())
            rms[profile] = float(difference.norm() / reference.norm())
        rows.append(Error(name, str(tensor.dtype).removeprefix("torch."), largest, rms))
    return rows


def lines(rows: Sequence[Error], markdown: bool) -> Iterator[str]:
    """The table of one width."""
    cells = [
        (e.boundary, e.dtype, *(f"{measure[p]:.2e}" for measure in (e.largest, e.rms) for p in PROFILES)) for e in rows
    ]
    heads = ("boundary", "dtype", "max, oracle", "max, portable", "RMS, oracle", "RMS, portable")
    if markdown:
        yield f"| {' | '.join(heads)} |"
        yield "|---" * len(heads) + "|"
        yield from (f"| `{name}` | {' | '.join(rest)} |" for name, *rest in cells)
        return
    for row in (heads, *cells):
        yield f"{row[0]:<26}{row[1]:<10}" + "".join(f"{cell:>15}" for cell in row[2:])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 4096], help="the widths D (default: 128 4096)")
    parser.add_argument("--tokens", type=int, default=16, help="T (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    options = parser.parse_args(argv)
    if min([*options.hidden, options.tokens]) < 1:
        parser.error("--hidden and --tokens must be positive")
    for hidden in options.hidden:
        if sys.stderr.isatty():
            print(f"\r\033[KD={hidden}", end="", file=sys.stderr, flush=True)
        rows = errors(hidden, options.tokens)
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        print(f"D={hidden}, T={options.tokens}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}\n")
        print("\n".join(lines(rows, options.markdown)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
