"""The benchmarks measure what they say, at small sizes; nothing here is about speed."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import bars, block, elementary_profiles, gate, hf, measure, processes, profile_error, rendering
from benchmarks.eager import EagerBlock
from benchmarks.implementations import FORWARD_OUTPUTS, GRADIENTS, IMPLEMENTATIONS, Implementation
from benchmarks.inputs import draw
from benchmarks.operator_calls import contract_call, flops, returned_tensors
from benchmarks.results import BOTH, FORWARD, Cell, Result
from benchmarks.roofline import Roofline
from benchmarks.session import Options
from benchmarks.timing import Task, interleave
from rl_engine.mhc import oracle
from rl_engine.mhc.elementary import ORACLE_PROFILE, PORTABLE_PROFILE
from rl_engine.mhc.operators.interface import LEAF_OPERATORS
from rl_engine.mhc.trace import BACKWARD_BOUNDARIES, FORWARD_BOUNDARIES

HOME = (
    platform.machine() == "x86_64"
    and str(torch.__version__).startswith("2.13.")
    and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
)
COUNT = 8192
at_home = pytest.mark.skipif(not HOME, reason="torch's own functions differ elsewhere")


@pytest.fixture(scope="module")
def measured() -> dict[str, elementary_profiles.Measured]:
    return {one.what: one for one in elementary_profiles.measure(COUNT, ())}


def test_the_portable_functions_are_right(measured: dict[str, elementary_profiles.Measured]) -> None:
    for what in ("portable sqrt of FP32 against IEEE 754", "portable exp not the nearest FP32 number"):
        assert (measured[what].moved, measured[what].total) == (0, COUNT)


@at_home
def test_torchs_are_not(measured: dict[str, elementary_profiles.Measured]) -> None:
    def share(what: str) -> float:
        return measured[what].moved / measured[what].total

    assert 0.03 < share("torch.sigmoid, contiguous against strided") < 0.05
    assert 0.02 < share("torch.sigmoid, a copy of h's first 4 columns against the view") < 0.07
    assert 0.1 < share("torch.sqrt of FP32 against IEEE 754") < 0.2
    assert 0.005 < share("torch.exp against portable exp") < 0.02
    assert 0 < share("torch.sigmoid, strided, against portable sigmoid") < 0.001


@at_home
def test_hashes_move_with_the_vector_instructions() -> None:
    found = elementary_profiles.hashes(ORACLE_PROFILE)
    assert found.total == 163
    assert 0 < found.moved < 163


def test_draws_are_the_same_on_every_machine() -> None:
    x = elementary_profiles.uniform("exp", 4, -64.0, 64.0)
    assert x.dtype == torch.float32
    assert [float(v).hex() for v in x] == [
        "0x1.9cd1400000000p+1",
        "0x1.e792880000000p+4",
        "0x1.46c5440000000p+5",
        "0x1.570fb00000000p+3",
    ]
    assert bool((x >= -64).all() and (x < 64).all())


def test_a_root_that_is_not_the_nearest_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right, x = np.sqrt, np.arange(1, 9, dtype=np.float32)
    assert elementary_profiles.ieee_root(x)[3] == 2.0
    monkeypatch.setattr(np, "sqrt", lambda values: np.nextafter(right(values), np.float32(9)))
    with pytest.raises(RuntimeError, match="not the nearest"):
        elementary_profiles.ieee_root(x)


def test_no_speed_of_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    assert elementary_profiles.timing(64, 1).threads == torch.get_num_threads()
    monkeypatch.setattr(torch, "exp", lambda x: elementary_profiles.PORTABLE.exp(x) * (1 + 2.0**-20))
    with pytest.raises(RuntimeError, match="no timing"):
        elementary_profiles.timing(64, 1)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert elementary_profiles.main(["--count", "64", "--profiles", "--repeats", "1", "--markdown"]) == 0
    printed = capsys.readouterr()
    assert "| portable exp not the nearest FP32 number | 0 | 64 | 0 % |" in printed.out
    assert "exp of 64 elements" in printed.out
    assert printed.err == ""


def test_the_error_of_every_boundary_is_that_of_its_format() -> None:
    rows = {row.boundary: row for row in profile_error.errors(hidden=8, tokens=3)}
    assert set(rows) == {*FORWARD_BOUNDARIES, *BACKWARD_BOUNDARIES, *profile_error.PARAMETERS}
    for row in rows.values():
        for profile in (ORACLE_PROFILE, PORTABLE_PROFILE):
            admitted = 2.0**-8 if row.dtype == "bfloat16" else 1e-5
            assert row.rms[profile] < admitted, row.boundary
            assert row.largest[profile] < admitted, row.boundary
            if row.boundary in ("controller.p", "split.c", "post.r_new", "bwd.d_r_old", "grad.d_controller_weight"):
                assert row.largest[profile] > 0, row.boundary


def test_a_wrong_boundary_has_a_large_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = profile_error.sinkhorn
    monkeypatch.setattr(profile_error, "sinkhorn", lambda logits: right(logits).transpose(1, 2))
    rows = {row.boundary: row for row in profile_error.errors(hidden=8, tokens=3)}
    assert rows["split.c"].largest[PORTABLE_PROFILE] > 0.01
    assert rows["split.pre"].largest[PORTABLE_PROFILE] < 1e-5


def test_the_errors_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile_error.main(["--hidden", "4", "--tokens", "2", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("D=4, T=2, ")
    assert len(re.findall(r"^\| `[\w.]+` \| (?:float32|bfloat16)(?: \| \d\.\d\de-?\+?\d\d){4} \|$", out, re.M)) == 25
    with pytest.raises(SystemExit):
        profile_error.main(["--tokens", "0"])


# --- the block ---

ADMITTED = {"eager": 0.02, "hf": 0.25}
"""Relative errors that the peers may have at D=32: BF16 gradients; HF mixes in BF16, and small sums cancel."""


def planted(name: str, wrong: bool) -> Implementation:
    """A "strict" implementation: the oracle, or the oracle with one element of ``r_new`` moved by one step."""
    honest = IMPLEMENTATIONS["oracle"]

    def make(inputs: Any) -> Any:
        runs = honest.make(inputs)

        def forward() -> Any:
            r_new, saved = runs.forward()
            if wrong:
                r_new.view(torch.int16)[0, 1, 2] ^= 1
            return r_new, saved

        return dataclasses.replace(runs, forward=forward)

    return dataclasses.replace(honest, name=name, make=make, is_reference=False)


def named(*ones: Implementation) -> dict[str, Implementation]:
    return {one.name: one for one in ones}


def quick(registry: dict[str, Implementation], **more: Any) -> Result:
    options = Options(tokens=(1, 4), hidden=16, threads=1, budget_s=0.0, least=1, extras=False, **more)
    return measure.run(options, lambda text: None, registry)


def test_the_registry_is_well_formed() -> None:
    for name, one in IMPLEMENTATIONS.items():
        assert one.name == name and one.about
        assert one.strict == (one.profile is not None), name
        assert set(one.operators) <= set(LEAF_OPERATORS) and bool(one.operators) <= (one.operator is not None), name
        assert one.threads is None or one.threads > 0, name
    strict = [(one.profile, one.threads) for one in IMPLEMENTATIONS.values() if one.name.startswith("native")]
    assert sorted(strict, key=str) == sorted(
        [(profile, threads) for profile in (ORACLE_PROFILE, PORTABLE_PROFILE) for threads in (None, 1)], key=str
    )
    assert {"eager", "compile", "hf", "hf-compile", "oracle"} < set(IMPLEMENTATIONS)
    assert [one.name for one in IMPLEMENTATIONS.values() if one.is_reference] == ["oracle"]


@pytest.mark.parametrize("name", ["eager", "hf"])
def test_a_peer_computes_the_block(name: str) -> None:
    if name == "hf":
        pytest.importorskip("transformers", reason="the bench extra is not installed; HF's block cannot be compared")
        assert hf.unavailable() == ""
    one, inputs = IMPLEMENTATIONS[name], draw(32, 5)
    found = gate.whole_block(one, inputs)
    assert found.red == "" and found.error is not None
    assert 0 < found.error < ADMITTED[name], found.worst
    assert found.compared == len(FORWARD_OUTPUTS) + len(FORWARD_OUTPUTS) + len(GRADIENTS)


def test_the_error_of_a_wrong_peer_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import eager

    right = eager.mix
    monkeypatch.setattr(eager, "mix", lambda r_old, y, c, post: right(r_old, y, c.transpose(1, 2), post))
    assert (gate.whole_block(IMPLEMENTATIONS["eager"], draw(32, 5)).error or 0) > 0.05


def test_a_wrong_strict_implementation_has_no_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = named(planted("right", False), planted("wrong", True))
    path = tmp_path / "result.json"
    command = ["--quick", "--tokens", "2", "--hidden", "16", "--threads", "1", "--budget", "0.001"]
    monkeypatch.setenv("COLUMNS", "160")
    assert block.main([*command, "--operators", "none", "--json", str(path)], registry) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    rows = [line for line in printed.out.splitlines() if line.startswith("│ wrong")]
    assert len(rows) == 3
    assert "RED" in rows[0] and "post.r_new: 1 of" in rows[0]
    for row in rows[1:]:
        assert re.fullmatch(r"│ wrong\s+│\s+RED │", row), row
    result = json.loads(path.read_text(encoding="utf-8"))
    assert {cell["implementation"] for cell in result["cells"]} == {"right"}
    assert all(cell["median_us"] > 0 for cell in result["cells"])
    assert "first at [0, 1, 2]" in result["findings"]["wrong"]["red"]
    assert result["findings"]["right"]["red"] == ""


def test_what_turns_wrong_on_the_timed_inputs_has_no_time() -> None:
    right = planted("late", False)

    def make(inputs: Any) -> Any:
        return (planted("late", True) if inputs.tokens == 4 else right).make(inputs)

    result = quick(named(dataclasses.replace(right, make=make)))
    assert result.red == ["late"]
    assert "the first 3 of T=4" in result.findings["late"].red
    assert result.cells == []


def test_what_raises_or_is_missing_is_said() -> None:
    def broken(inputs: Any) -> Any:
        raise RuntimeError("no kernel")

    honest = planted("right", False)
    raising = dataclasses.replace(honest, name="raising", make=broken)
    absent = dataclasses.replace(honest, name="absent", unavailable=lambda: "not built")
    result = quick(named(honest, raising, absent))
    assert result.findings["raising"].red == "raised RuntimeError: no kernel"
    assert result.unavailable == {"absent": "not built"}
    assert {cell.implementation for cell in result.cells} == {"right"}


def test_a_wrong_operator_alone_is_refused() -> None:
    def operator(inputs: Any, name: str) -> Any:
        call = contract_call(oracle, inputs, name)
        return lambda: tuple(t.neg() for t in returned_tensors(call()))

    result = quick(named(dataclasses.replace(planted("negated", False), operator=operator)), operators=LEAF_OPERATORS)
    assert "hc_split_sinkhorn_fwd alone: result 0" in result.findings["negated"].red
    assert result.operators == []


def test_every_operator_can_be_timed_alone() -> None:
    result = quick(named(IMPLEMENTATIONS["oracle"], IMPLEMENTATIONS["eager"]), operators=LEAF_OPERATORS)
    timed = {(row.implementation, row.operator) for row in result.operators}
    assert {operator for name, operator in timed if name == "oracle"} == set(LEAF_OPERATORS)
    assert {operator for name, operator in timed if name == "eager"} == set(IMPLEMENTATIONS["eager"].operators)
    (row,) = [r for r in result.operators if (r.implementation, r.operator) == ("oracle", "mhc_post_fwd")]
    assert row.gbs * row.median_us * row.tokens == pytest.approx(1e-3 * 4 * (2 * 16 * 9 + 4 * 20))
    assert flops("fp32_gemm_rms_fwd", 2, 4096) == 2 * 25 * 2 * 4 * 4096


class Clocked(Task):
    """A task whose calls take a millisecond by a clock of its own."""

    def _once(self) -> float:
        self.call()
        self.spent += 0.001
        return 0.001


def test_interleaved_calls_take_turns() -> None:
    turns: list[str] = []
    tasks = [Clocked(("a",), lambda: turns.append("a"), 1), Clocked(("b",), lambda: turns.append("b"), 1)]
    found = interleave(tasks, budget_s=0.05, least=45, progress=lambda text: None)
    assert re.fullmatch("(a{21}b{21}){3}", "".join(turns)), "the first call of a visit is not counted"
    assert found[("a",)].count == found[("b",)].count == 60


def test_bars_compare_with_what_was_measured() -> None:
    result = Result({}, 4096, 2, [1, 512])
    assert {bar.verdict for bar in bars.bars(result)} == {"not measured"}
    times = {"native": (40.0, 15.0), "native-portable": (40.0, 18.0), "hf-compile": (200.0, 43.0), "eager": (0, 226.0)}
    for name, (one, many) in times.items():
        result.cells += [Cell(name, FORWARD, 1, 2, one), Cell(name, FORWARD, 512, 2, many), Cell(name, BOTH, 512, 2, 1)]
    result.roofline = Roofline("avx512", 2, 100.0, 1.0, 20.0)
    result.memory = processes.Memory(4096, 1000, 1000, 0, 200)
    found = {bar.what: bar for bar in bars.bars(result)}
    assert found["block forward, T=512, against eager"].aim_met is True
    assert found["block forward, T=512, against hf-compile"].aim_met is False
    verdicts = {what: bar.verdict for what, bar in found.items() if bar.verdict != "not measured"}
    assert verdicts == {
        "block forward, T=512, against eager": "met",
        "block forward, T=512, against hf-compile": "met",
        "block forward+backward, T=512, against eager": "missed",
        "block forward+backward, T=512, against hf-compile": "missed",
        "block forward, T=1, against hf-compile": "met",
        "block forward, T=1, over the K chain's dependent adds": "missed",
        "peak extra memory of forward+backward over the inputs, T=4096": "missed",
        "block forward, T=512, portable over oracle profile": "missed",
    }


def test_json_is_json_and_a_plot_is_a_picture(tmp_path: Path) -> None:
    result = quick(named(IMPLEMENTATIONS["oracle"], IMPLEMENTATIONS["eager"]))
    result.findings["eager"] = dataclasses.replace(result.findings["eager"], error=float("inf"))
    found = json.loads(rendering.to_json(result))
    assert found["schema"] == "rl_engine.mhc/benchmark/v1"
    assert found["findings"]["eager"]["error"] == "inf"
    assert found["tokens"] == [1, 4]
    pytest.importorskip("matplotlib", reason="the bench extra is not installed; nothing can be plotted")
    rendering.plot(result, tmp_path / "times.svg")
    assert "<svg" in (tmp_path / "times.svg").read_text(encoding="utf-8")


def test_memory_counts_each_storage_once() -> None:
    x = torch.zeros(8)
    assert processes.storage_bytes([x, x[2:], None, torch.zeros(2)]) == 40
    assert list(processes.flat({"a": (1, [2]), "b": 3})) == [1, 2, 3]


@pytest.mark.parametrize(
    "wrong", [["--tokens", "x"], ["--tokens", "0"], ["--implementations", "nobody"], ["--plot", "times.gif"]]
)
def test_wrong_options_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        block.main(wrong)
    assert raised.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_the_eager_block_leaves_the_batch_alone() -> None:
    inputs = draw(16, 3)
    before = [t.clone() for t in inputs.tensors()]
    IMPLEMENTATIONS["eager"].make(inputs).both()
    assert all(torch.equal(a, b) for a, b in zip(before, inputs.tensors(), strict=True))
    assert not any(t.requires_grad for t in inputs.tensors())
    assert len(EagerBlock(inputs.batch).leaves()) == 4
