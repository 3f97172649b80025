"""The benchmark of the module: its gate sees a wrong byte, its count of kept bytes is exact, its bars compare."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks import modules
from benchmarks.eager import EagerBlock
from benchmarks.inputs import draw
from benchmarks.timing import Sample

INPUTS = draw(64, 8)


def test_the_module_passes_its_gate() -> None:
    assert modules.gate(INPUTS) == ""


def test_a_wrong_module_has_no_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = modules.module_of

    def wrong(batch: object) -> object:
        module = right(batch)  # type: ignore[arg-type]
        with torch.no_grad():
            module.controller.bias[5] += 2.0**-10
        return module

    monkeypatch.setattr(modules, "module_of", wrong)
    assert modules.gate(INPUTS).startswith("r_new is not the oracle's at T=3, T=8")
    monkeypatch.setattr(modules, "draw", lambda hidden, tokens: INPUTS)
    assert modules.main(["--hidden", "64"]) == 1
    assert "RED: r_new" in capsys.readouterr().err


def test_kept_bytes_are_counted_once_and_without_parameters() -> None:
    module, streams = modules.module_of(INPUTS.batch), INPUTS.batch.r_old
    assert modules.kept_bytes(module, streams, list(module.parameters())) == 8 * 64 + 2 * 64 + 4 * 71
    eager = EagerBlock(INPUTS.batch)
    assert modules.kept_bytes(eager, streams, list(eager.parameters())) > 5 * 8 * 64

    weight = nn.Parameter(torch.ones(4, 64))

    def squared(x: Tensor) -> Tensor:
        return (x.float() * weight).square()

    assert modules.kept_bytes(squared, streams, [weight]) == 2 * 4 * 4 * 64  # the FP32 copy and the product


def test_everything_that_is_timed_computes_the_same_streams() -> None:
    """Not byte for byte, as plain PyTorch rounds elsewhere; the compiled ones are not run here."""
    calls = modules.training(INPUTS)
    ours = calls["module"]()
    eager = calls["eager"]()
    torch.testing.assert_close(eager[0].float(), ours[0].float(), rtol=0, atol=0.05)
    torch.testing.assert_close(eager[1][0].float(), ours[1][0].float(), rtol=0, atol=0.2)
    one = modules.decoding(INPUTS)
    assert torch.equal(one["backend calls"]().view(torch.int16), one["module forward"]().view(torch.int16))


def test_bars_compare_with_what_was_measured() -> None:
    def samples(**seconds: float) -> modules.Samples:
        return {(name.replace("_", "-"),): Sample(s, s, 5) for name, s in seconds.items()}

    train = samples(backend=1.0, module=1.1, eager=9.0, hf_compile=0.9)
    decode = {("module forward",): Sample(3e-4, 3e-4, 5), ("backend calls",): Sample(2.5e-4, 2.5e-4, 5)}
    found = {bar.what: (bar.measured, bar.verdict) for bar in modules.bars(train, decode, {"module": 130.0}, 100.0)}
    assert list(found.values()) == [
        ("1.1x", "met"),
        ("0.818x", "missed"),
        ("8.18x", "met"),
        ("50 µs", "met"),
        ("1.3x", "missed"),
    ]
    del train["hf-compile",]
    assert modules.bars(train, decode, {"module": 130.0}, 100.0)[1].verdict == "not measured"
