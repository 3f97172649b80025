"""``docs/verdict.schema.json`` describes real verdicts: passed, failed and refused ones, and nothing is left out."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from examples.faulty_providers import TruncatingStore
from examples.ten_line_provider import TenLineProvider
from rl_engine.mhc.acceptance import VERDICT_SCHEMA, Options, judge_provider
from rl_engine.mhc.provider import ReferenceProvider, StubProvider
from rl_engine.mhc.reports import render_json

DOCS = Path(__file__).resolve().parents[1] / "docs"
SCHEMA: dict[str, Any] = json.loads(DOCS.joinpath("verdict.schema.json").read_text(encoding="utf-8"))
FEW = Options(cases=("no_tokens", "rms_edges", "sinkhorn_edges"))


class Raises(TenLineProvider):
    """An operator that raises."""

    def h_aggregate_fwd(self, pre: torch.Tensor, r_old: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")


class WrongKinds(ReferenceProvider):
    """NaN for a number, a wrong dtype, a tensor too few, and provenance that is not true."""

    name = "wrong-kinds"

    def rmsnorm_residual_fwd(self, x: torch.Tensor, gamma: torch.Tensor, eps: float) -> Any:
        y, residual, saved = super().rmsnorm_residual_fwd(x, gamma, eps)
        return torch.full_like(y, math.nan), residual.float(), saved

    def rmsnorm_residual_bwd(self, *args: Any) -> Any:
        return None, super().rmsnorm_residual_bwd(*args)[1][:1]

    def provenance(self) -> dict[str, Any]:
        return {"actual_backend": 7}


def strict(schema: Any) -> Any:
    """``schema`` with every object closed to properties that it does not name."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if isinstance(closed.get("properties"), dict) and closed.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def properties(schema: Any) -> Iterator[str]:
    """The names of all properties that ``schema`` describes."""
    if isinstance(schema, list):
        for item in schema:
            yield from properties(item)
    elif isinstance(schema, dict):
        if "type" in schema and isinstance(schema.get("properties"), dict):
            yield from schema["properties"]
        for value in schema.values():
            yield from properties(value)


@pytest.fixture(scope="module")
def passed() -> dict[str, Any]:
    """The verdict on the reference, on a few cases."""
    return document(ReferenceProvider())


def document(provider: Any) -> dict[str, Any]:
    return json.loads(render_json(judge_provider(provider, FEW)))  # type: ignore[no-any-return]


def problems(verdict: Any) -> list[str]:
    return [
        f"{error.json_path}: {error.message}" for error in Draft202012Validator(strict(SCHEMA)).iter_errors(verdict)
    ]


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["schema"]["const"] == VERDICT_SCHEMA == SCHEMA["title"]


def test_a_passing_verdict_is_valid(passed: dict[str, Any]) -> None:
    assert passed["passed"] is True
    assert problems(passed) == []


@pytest.mark.parametrize("provider", [TruncatingStore, Raises, WrongKinds])
def test_a_failing_verdict_is_valid(provider: Any) -> None:
    options = Options(cases=("one_row", "rms_edges"))
    verdict = json.loads(render_json(judge_provider(provider(), options)))
    assert verdict["passed"] is False
    assert verdict["first_divergence"] is not None
    assert problems(verdict) == []


def test_the_kinds_and_a_nan_are_in_a_failing_verdict() -> None:
    verdict = document(WrongKinds())
    kinds = {d["kind"] for check in verdict["checks"] for d in check["divergences"]}
    assert {"bytes", "dtype", "presence", "shape", "provenance"} <= kinds
    assert '"candidate": "nan"' in json.dumps(verdict)


def test_a_refused_verdict_is_valid() -> None:
    verdict = document(StubProvider())
    assert verdict["refusals"]
    assert verdict["pending"]
    assert verdict["provenance"] == {}
    assert problems(verdict) == []


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (["schema"], "rl_engine.mhc/verdict/v0"),
        (["passed"], "yes"),
        (["comparisons"], -1),
        (["refusals"], [1]),
        (["provenance", "operators", "mhc_post_fwd"], None),
        (["environment", "threads"], 2),
        (["environment", "rl_engine.mhc"], None),
        (["options", "cases"], "one_row"),
        (["options", "geometry"], "wide"),
        (["options", "surplus"], 1),
        (["checks", 0, "status"], "ok"),
        (["checks", 0, "divergences"], [{"boundary": "post.r_new"}]),
        (["checks", 0, "surplus"], 1),
    ],
)
def test_a_wrong_verdict_is_found(where: list[Any], value: Any, passed: dict[str, Any]) -> None:
    verdict = copy.deepcopy(passed)
    assert problems(verdict) == []
    place: Any = verdict
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    assert problems(verdict)


def test_a_missing_field_is_found(passed: dict[str, Any]) -> None:
    assert set(SCHEMA["required"]) == set(passed)
    for key in passed:
        assert problems({k: v for k, v in passed.items() if k != key})


def test_the_page_names_every_field_and_its_example_is_valid() -> None:
    page = DOCS.joinpath("verdict_schema.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_.]+)`", page))
    assert set(properties(SCHEMA)) <= named
    assert set(SCHEMA["$defs"]["kind"]["enum"]) | set(SCHEMA["$defs"]["check"]["properties"]["status"]["enum"]) <= named
    (example,) = re.findall(r"^```json\n(.*?)^```", page, re.M | re.S)
    assert problems(json.loads(example)) == []
