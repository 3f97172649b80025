"""``HyperConnection`` around the identity, timed: what the module and operation layers cost, and what they keep.

    python -m benchmarks.modules [--hidden 4096] [--threads 2] [--budget 2.0]

Correctness first: the module's bytes must be those of the oracle on the first rows. Then, interleaved in this process:
forward + backward beside the backend's own block, plain PyTorch and HF transformers, T=512; a forward of one token
beside the two backend calls that it makes; and the bytes that autograd keeps for the backward.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import hf
from benchmarks.bars import at_least, at_most
from benchmarks.block import progress
from benchmarks.eager import EagerBlock
from benchmarks.implementations import native_ops
from benchmarks.inputs import Inputs, draw
from benchmarks.results import Bar
from benchmarks.timing import Sample, Task, interleave
from rl_engine.mhc.bits import same_bytes
from rl_engine.mhc.contract import GradBoundary, ResidualBatch
from rl_engine.mhc.elementary import ORACLE_PROFILE
from rl_engine.mhc.nn import HyperConnection, MHCController
from rl_engine.mhc.provider import ReferenceProvider

TOKENS, ROWS = 512, 3
Samples = dict[tuple[str, ...], Sample]


def module_of(batch: ResidualBatch) -> HyperConnection:
    """The module with the parameters of a batch."""
    module = HyperConnection(nn.Identity(), batch.hidden)
    module.controller = MHCController.from_params(batch.controller)
    with torch.no_grad():
        module.norm.weight.copy_(batch.norm.gamma)
    return module


def step(run: Callable[[Tensor], Any], streams: Tensor, parameters: Sequence[Tensor], grad: Tensor) -> Any:
    """New streams, and the gradients of the streams and the parameters."""
    out = run(streams)
    out = out[0] if isinstance(out, tuple) else out
    return out, torch.autograd.grad(out, (streams, *parameters), grad)


def gate(inputs: Inputs) -> str:
    """Why the module has no time; empty where the bytes of its first rows are the oracle's."""
    few, ref = inputs.first(ROWS), ReferenceProvider(ORACLE_PROFILE)
    batch = few.batch
    _, normalized, _, post, c, _ = ref.mhc_pre_rmsnorm_fused_fwd(batch)
    want = ref.mhc_post_fwd(batch.r_old, normalized, c, post)
    module = module_of(batch)
    with torch.no_grad():
        outputs = {"T=3": module(batch.r_old), f"T={inputs.tokens}": module(inputs.batch.r_old)[:ROWS]}
    wrong = [name for name, got in outputs.items() if not same_bytes(got, want)]
    return f"r_new is not the oracle's at {', '.join(wrong)}" if wrong else ""


def training(inputs: Inputs) -> dict[str, Callable[[], Any]]:
    """Forward + backward of everything that is compared, each around the identity."""
    batch, d_r_new = inputs.batch, inputs.grads.d_r_new
    ops, streams = native_ops(ORACLE_PROFILE), batch.r_old.clone().requires_grad_()
    grads = GradBoundary(d_r_new, inputs.grads.d_normalized, torch.zeros_like(inputs.grads.d_residual))

    def backend() -> Any:
        r_new, saved = ops.mhc_block_forward(batch)
        return r_new, ops.mhc_block_backward(batch, saved, grads)

    ours, eager = module_of(batch), EagerBlock(batch)
    runs: dict[str, tuple[Callable[[Tensor], Any], list[nn.Parameter]]] = {
        "module": (ours, list(ours.parameters())),
        "module-compile": (torch.compile(ours, fullgraph=True), list(ours.parameters())),
        "eager": (eager, list(eager.parameters())),
    }
    if not hf.unavailable():
        theirs = hf.HFBlock(batch)
        runs["hf-compile"] = (torch.compile(theirs, dynamic=False), list(theirs.leaves()))  # type: ignore[assignment]
    found: dict[str, Callable[[], Any]] = {"backend": backend}
    for name, (run, parameters) in runs.items():
        found[name] = lambda run=run, parameters=parameters: step(run, streams, parameters, d_r_new)  # type: ignore[misc]
    return found


def decoding(inputs: Inputs) -> dict[str, Callable[[], Any]]:
    """A forward of one token without autograd, and the two calls into the backend that it makes."""
    batch = inputs.first(1).batch
    ops, module = native_ops(ORACLE_PROFILE), module_of(batch)

    def backend() -> Any:
        _, normalized, _, post, c, _ = ops.mhc_pre_rmsnorm_fused_fwd(batch)
        return ops.mhc_post_fwd(batch.r_old, normalized, c, post)

    def forward() -> Any:
        with torch.no_grad():
            return module(batch.r_old)

    return {"backend calls": backend, "module forward": forward}


def kept_bytes(run: Callable[[Tensor], Any], streams: Tensor, parameters: Sequence[Tensor]) -> float:
    """Bytes a token of the distinct storages that autograd keeps, parameters apart."""
    kept: dict[int, int] = {}
    alive = []  # an address belongs to one storage for as long as that lives

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        alive.append(t)
        return t

    leaf = streams.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(leaf)
    for parameter in parameters:
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(kept.values()) / len(streams)


def timed(calls: dict[str, Callable[[], Any]], threads: int, budget: float) -> Samples:
    """The median and the best of each, interleaved."""
    for name, call in calls.items():
        progress(f"{name}: first call")
        call()
    return interleave([Task((name,), call, threads) for name, call in calls.items()], budget, 5, progress)


def alternating(calls: dict[str, Callable[[], Any]], budget: float) -> Samples:
    """The median and the best of calls so short that only neighbours in time can be compared."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + budget
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {(name,): Sample(statistics.median(s), min(s), len(s)) for name, s in seconds.items()}


def bars(train: Samples, decode: Samples, kept: dict[str, float], streams_bytes: float) -> list[Bar]:
    """What must hold, beside what this run measured."""

    def ratio(a: str, b: str) -> float | None:
        return train[a,].median_s / train[b,].median_s if (a,) in train else None

    overhead = 1e6 * (decode["module forward",].median_s - decode["backend calls",].median_s)
    return [
        at_most("module forward+backward, T=512, over the backend's own", ratio("module", "backend"), 1.15),
        at_least("the same against hf-compile", ratio("hf-compile", "module"), 1.0, 2.0),
        at_least("the same against eager", ratio("eager", "module"), 1.0, 10.0),
        at_most("one token, forward: over the backend's two calls", overhead, 60, unit=" µs"),
        at_most("kept for the backward, of the streams' own bytes", kept["module"] / streams_bytes, 1.2),
    ]


def show(train: Samples, decode: Samples, kept: dict[str, float], found: list[Bar]) -> None:
    """Two tables."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    times = Table("what", "T", "µs", "µs/token", "best µs", "kept B/token", title="around the identity, median")
    for samples, tokens in ((train, TOKENS), (decode, 1)):
        for (name,), sample in samples.items():
            shown = (
                f"{1e6 * sample.median_s:.4g}",
                f"{1e6 * sample.median_s / tokens:.4g}",
                f"{1e6 * sample.best_s:.4g}",
            )
            times.add_row(name, str(tokens), *shown, f"{kept[name]:.0f}" if name in kept and tokens > 1 else "")
    verdicts = Table("what", "measured", "bar", "verdict", title="bars")
    for bar in found:
        verdicts.add_row(bar.what, bar.measured, bar.bar, bar.verdict)
    console.print(times, verdicts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096, help="D (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for each row (default: %(default)s)")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    inputs = draw(options.hidden, TOKENS)
    red = gate(inputs)
    if red:
        print(f"RED: {red}", file=sys.stderr)
        return 1
    ours, eager = module_of(inputs.batch), EagerBlock(inputs.batch)
    streams = inputs.batch.r_old
    kept = {"module": kept_bytes(ours, streams, list(ours.parameters()))}
    kept["eager"] = kept_bytes(eager, streams, list(eager.parameters()))
    try:
        train = timed(training(inputs), options.threads, options.budget)
        decode = alternating(decoding(inputs), options.budget)
    finally:
        progress("")
    show(train, decode, kept, bars(train, decode, kept, 8.0 * options.hidden))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
