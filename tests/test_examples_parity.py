"""The demonstration of ``examples/train_infer_parity.py``: what it claims, what it counts, and that it can fail."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from examples import train_infer_parity as example
from examples.parity import strict
from examples.parity.comparing import compared
from examples.parity.corpus import PADDING, SUCCESSORS, VOCABULARY, Batch, Corpus, packed, padded
from examples.parity.model import LanguageModel
from examples.parity.scoring import PACKED, Scored, gathered, in_bf16
from rl_engine.mhc.bits import tensor_bytes
from rl_engine.mhc.contract import PORTABLE_PROFILE
from rl_engine.mhc.ops import using_backend
from tests import parity_defects

SMALL = ("--hidden", "64", "--layers", "1", "--tokens", "48", "--sequences", "3")
STRICT, PLAIN, DECODED = "rl_engine.mhc", "plain PyTorch", "token by token, KV cache"
REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def result() -> example.Result:
    return example.run(64, 1, 12, 48, 3, 0, lambda _: None)


def call(*options: str) -> Any:
    return CliRunner().invoke(example.app, [*SMALL, *options])


# --- what it claims ---


def test_the_strict_model_has_the_same_bytes_in_every_scoring(result: example.Result) -> None:
    scored = result.found[STRICT]
    assert len(scored) == 5
    want = scored.pop(PACKED)
    assert want.chosen.shape == (45,)
    assert want.log_probs.shape == (48, VOCABULARY)
    assert want.streams.shape == (2, 48, 4, 64)
    for name, got in scored.items():
        for field in ("chosen", "log_probs", "streams"):
            assert tensor_bytes(getattr(got, field)) == tensor_bytes(getattr(want, field)), f"{name}: {field}"
    scored[PACKED] = want


def test_the_strict_figures_are_exact(result: example.Result) -> None:
    found = [c for c in result.comparisons if c.model == STRICT]
    assert len(found) == 4
    for c in found:
        assert (c.moved, c.words_moved, c.hidden_moved, c.largest) == (0, 0, 0, 0.0)
        assert (c.kl, c.ratio_low, c.ratio_high) == (0.0, 1.0, 1.0)
        assert (c.tokens, c.hidden, c.moved_by_block) == (45, 2 * 48 * 4 * 64, (0.0, 0.0))
    assert result.same


def test_the_plain_model_differs_and_is_counted(result: example.Result) -> None:
    (c,) = [c for c in result.comparisons if (c.model, c.scoring) == (PLAIN, DECODED)]
    assert 0 < c.moved <= c.tokens
    assert 0 < c.hidden_moved < c.hidden
    assert c.kl > 0
    assert c.ratio_low < 1 < c.ratio_high
    assert not c.exact


def test_both_are_the_same_model(result: example.Result) -> None:
    mine, other = (result.found[name][PACKED].log_probs for name in (STRICT, PLAIN))
    assert 0 < (mine - other).abs().max() < 0.1
    assert mine.std() > 0.3


def test_training_lowers_the_loss(result: example.Result) -> None:
    assert len(result.losses) == 12
    assert result.losses[-1] < result.losses[0] - 0.2


def test_every_parameter_has_a_gradient() -> None:
    model = LanguageModel(strict.arithmetic(), 32, 1)
    batch = packed(Corpus(1).draw(12, 2))
    model(batch).log_probs.square().mean().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not without


def test_a_rollout_keeps_controllers_and_norms_in_fp32() -> None:
    copied = in_bf16(LanguageModel(strict.arithmetic(), 32, 1))
    wide = {name for name, p in copied.named_parameters() if p.dtype == torch.float32}
    assert len(wide) == 2 * 6 + 1
    assert all(".controller." in name or "norm." in name for name in wide)


# --- the strict parts ---


def tensors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def test_a_key_that_is_not_seen_leaves_every_bit() -> None:
    q, k, v = (tensors(1, 2, 1, 32, seed=1), tensors(1, 2, 9, 32, seed=2), tensors(1, 2, 9, 32, seed=3))
    v[..., 4:, ::2] = -0.0
    v[..., :3, 1] = -0.0
    sees = torch.zeros(1, 1, 1, 9, dtype=torch.bool)
    sees[..., 2:6] = True
    want = strict.attend(q, k[:, :, 2:6], v[:, :, 2:6], sees[..., 2:6])
    assert tensor_bytes(strict.attend(q, k, v, sees)) == tensor_bytes(want)


def test_attention_and_its_gradients_are_those_of_softmax() -> None:
    sees = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    ours = [tensors(2, 3, 5, 32, seed=s).requires_grad_() for s in range(3)]
    want = [t.detach().double().requires_grad_() for t in ours]
    upstream = tensors(2, 3, 5, 32, seed=9)
    got, exact = strict.attend(*ours, sees), F.scaled_dot_product_attention(*want, attn_mask=sees)
    got.backward(upstream)
    exact.backward(upstream.double())
    assert torch.allclose(got.double(), exact, rtol=2**-8, atol=1e-6)
    for mine, other in zip(ours, want, strict=True):
        assert torch.allclose(mine.grad.double(), other.grad, rtol=2**-5, atol=2**-7)  # type: ignore[union-attr]


def test_log_probs_and_gate_and_their_gradients() -> None:
    x, w = tensors(7, 32, seed=4).requires_grad_(), tensors(VOCABULARY, 32, seed=5)
    wide = x.detach().double().requires_grad_()
    got, exact = strict.log_probs(x, w), F.log_softmax(wide @ w.double().t(), dim=-1)
    assert torch.allclose(got.double(), exact, rtol=1e-5, atol=1e-5)
    got[:, 3].sum().backward()
    exact[:, 3].sum().backward()
    assert torch.allclose(x.grad.double(), wide.grad, rtol=2**-7, atol=2**-8)  # type: ignore[union-attr]
    gate, up = tensors(4, 8, seed=6).requires_grad_(), tensors(4, 8, seed=7)
    other = gate.detach().double().requires_grad_()
    strict.gated(gate, up).sum().backward()
    (F.silu(other) * up.double()).sum().backward()
    assert torch.allclose(gate.grad.double(), other.grad, rtol=2**-7, atol=2**-8)  # type: ignore[union-attr]


# --- the batches ---


def test_the_corpus_is_seeded_and_fills_its_tokens() -> None:
    drawn = Corpus(7).draw(64, 5)
    assert drawn == Corpus(7).draw(64, 5) != Corpus(8).draw(64, 5)
    assert (len(drawn), sum(map(len, drawn))) == (5, 64)
    long = Corpus(7).draw(4096, 1)[0]
    after: dict[int, set[int]] = {}
    for left, right in itertools.pairwise(long):
        after.setdefault(left, set()).add(right)
    assert max(map(len, after.values())) == SUCCESSORS


def test_padding_and_other_sequences_are_not_seen() -> None:
    batch = padded(((5, 6), (7, 8, 9)), (0, 1), "left")
    assert batch.tokens.tolist() == [[0, 5, 6], [7, 8, 9]]
    assert batch.segments.tolist() == [[PADDING, 0, 0], [1, 1, 1]]
    assert batch.sees(batch)[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    row = packed(((5, 6), (7, 8)))
    assert row.sees(row)[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_a_token_that_is_missing_or_scored_twice_is_refused() -> None:
    sequences = ((1, 2), (3, 4))
    model = LanguageModel(strict.arithmetic(), 32, 1)
    first, second = (padded(sequences, (number,)) for number in (0, 1))
    for batches, count in (((first,), 2), ((first, second, first), 6)):
        with pytest.raises(ValueError, match=rf"pieces: got {count} tokens, want each of 4 once"):
            gathered([(batch, model(batch)) for batch in batches], sequences)


# --- the comparison ---


def scored_like(log_probs: torch.Tensor) -> Scored:
    return Scored(log_probs[:, 0].clone(), log_probs, torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16))


def test_one_moved_bit_is_counted() -> None:
    packed_ = scored_like(torch.full((3, 2), math.log(0.5)))
    moved = packed_.log_probs.clone()
    moved.view(torch.int32)[1, 0] += 1
    found = compared("x", "y", scored_like(moved), packed_)
    assert (found.moved, found.words_moved, found.tokens, found.exact) == (1, 1, 3, False)
    assert (found.largest, found.ratio_low) == (2.0**-24, math.exp(-(2.0**-24)))
    assert found.kl > 0
    streams = packed_.streams.clone()
    streams[1, 2, 0, 0] = -0.0
    found = compared("x", "y", replace(packed_, streams=streams), packed_)
    assert (found.moved, found.hidden_moved, found.moved_by_block, found.exact) == (0, 1, (0.0, 1 / 60), False)
    assert compared("x", "y", packed_, packed_).exact


def test_nan_and_nothing_are_not_exact() -> None:
    nan = scored_like(torch.full((3, 2), math.nan))
    assert not compared("x", "y", nan, nan).exact
    found = compared("x", "y", scored_like(torch.zeros(3, 2)), scored_like(torch.zeros(3, 2)))
    assert not replace(found, tokens=0).exact


# --- the command ---


def test_the_command_says_same_and_writes_its_figures(tmp_path: Path) -> None:
    done = call("--steps", "1", "--json", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png"))
    assert done.exit_code == 0, done.output
    assert "SAME  rl_engine.mhc: every byte equal, KL 0, every ratio 1, in all scorings" in done.stdout
    assert done.stderr == ""
    figures = json.loads((tmp_path / "x.json").read_text())
    assert figures["same"] is True
    assert len(figures["losses"]) == 1
    assert [c["exact"] for c in figures["comparisons"] if c["model"] == STRICT] == [True] * 4
    assert [c["scoring"] for c in figures["comparisons"] if c["model"] == PLAIN][-1] == DECODED
    assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hidden", "33"), "hidden: got 33, want a positive multiple of 32"),
        (("--tokens", "5"), "tokens: got 5 for 3 sequences, want at least 4 for each"),
        (("--plot", "nowhere/x.png"), "cannot write nowhere/x.png"),
        (("--json", "."), "cannot write ."),
    ],
)
def test_a_wrong_call_says_what_is_wanted(options: tuple[str, ...], message: str) -> None:
    done = call(*options)
    assert (done.exit_code, message in done.stderr, done.stdout) == (2, True, "")


def test_a_plot_without_matplotlib_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(example, "run", lambda *_: pytest.fail("ran"))
    done = call("--plot", str(tmp_path / "x.png"))
    assert (done.exit_code, done.stderr) == (2, "error: --plot needs matplotlib: python -m pip install matplotlib\n")


def test_the_script_runs_from_anywhere_and_without_matplotlib(tmp_path: Path) -> None:
    script = REPOSITORY / "examples" / "train_infer_parity.py"
    argv = [str(script), *SMALL, "--steps", "0", "--json", "-"]
    code = f"import runpy, sys; sys.modules['matplotlib'] = None; sys.argv = {argv}; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["same"] is True
    assert done.stderr.startswith("each scoring beside that of the packed training batch:")


# --- it can fail ---


def fails(*options: str) -> str:
    done = call("--steps", "1", *options)
    assert done.exit_code == 1, done.output
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("DIFFERENT  rl_engine.mhc")]
    return line


@pytest.mark.parametrize(
    ("part", "defect"),
    [
        ("attend", parity_defects.torch_attention),
        ("gemm", parity_defects.split_for_many_rows),
    ],
)
def test_a_part_that_is_not_strict_is_found(
    part: str, defect: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict, part, defect)
    assert DECODED in fails()


def test_a_block_that_folds_by_the_number_of_tokens_is_found() -> None:
    with using_backend("cpu", PORTABLE_PROFILE, "tests.parity_defects:SplitsLargeBatches"):
        assert DECODED in fails()


def test_a_mask_that_shows_other_sequences_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "sees", parity_defects.blind_to_segments)
    assert "'one sequence a batch'" in fails()
