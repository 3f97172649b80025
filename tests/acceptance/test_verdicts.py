"""What the judge says of providers that are right, and of one that is not there yet."""

from __future__ import annotations

import pytest
import torch

from rl_engine.mhc.acceptance import Case, Options, Verdict, judge_provider
from rl_engine.mhc.acceptance.operator_cases import OPERATOR_CASES
from rl_engine.mhc.acceptance.runner import available_cases
from rl_engine.mhc.fixtures import BLOCK_CASES, make_batch, make_grads
from rl_engine.mhc.operators import LEAF_OPERATORS
from rl_engine.mhc.provider import ReferenceProvider, StubProvider
from tests.planted.honest import Honest, HonestPost, Standalone

HOSTILE = (
    "no_tokens",
    "zero_row",
    "extreme_rows",
    "saturated_comb",
    "asymmetric_comb",
    "fp32_gamma",
    "tiny_hidden",
    "odd_hidden",
)
BLOCK = ("one_row", "packed_t7_odd", "mixer_frozen", "fused_pre_norm", *HOSTILE)
OPERATORS = tuple(case.name for case in OPERATOR_CASES)


def judged(provider: object, *cases: str, **options: object) -> Verdict:
    return judge_provider(provider, Options(cases=cases, **options))  # type: ignore[arg-type]


def problems(verdict: Verdict) -> list[str]:
    return [*verdict.refusals, *(f"{c.group}, {c.name}, {c.case}: {c.detail}" for c in verdict.failures)]


@pytest.mark.parametrize(
    ("provider", "case"),
    [
        *((Standalone, case) for case in BLOCK),
        *((Honest, case) for case in ("packed_t7_odd", "no_tokens")),
        *((ReferenceProvider, case) for case in ("one_row", "no_tokens", "extreme_rows", "mixer_frozen")),
    ],
)
def test_a_right_provider_passes_every_block_case(provider: type, case: str) -> None:
    verdict = judged(provider(), case)
    assert problems(verdict) == []
    assert verdict.passed
    assert verdict.first_divergence is None
    assert {"boundaries", "invariance", "fail-closed", "provenance"} <= {check.group for check in verdict.checks}


@pytest.mark.parametrize("provider", [ReferenceProvider, Honest, Standalone], ids=lambda p: p.__name__)
def test_a_right_provider_passes_every_operator_case(provider: type) -> None:
    verdict = judged(provider(), *OPERATORS)
    assert problems(verdict) == []
    assert list(dict.fromkeys(check.case for check in verdict.checks if check.group == "operators")) == list(OPERATORS)


def test_the_cases_are_all_there() -> None:
    assert set(available_cases(Options())) == {*BLOCK_CASES, *HOSTILE, *OPERATORS}


@pytest.mark.parametrize(
    ("provider", "own", "backend"),
    [
        (ReferenceProvider, frozenset(), "reference"),
        (Honest, frozenset(LEAF_OPERATORS), "honest"),
        (Standalone, frozenset(LEAF_OPERATORS), "standalone"),
        (HonestPost, frozenset({"mhc_post_fwd"}), "honest-post+reference"),
    ],
)
def test_provenance_is_what_ran(provider: type, own: frozenset[str], backend: str) -> None:
    verdict = judged(provider(), "one_row", "fixed_gemm_bf16")
    assert problems(verdict) == []
    said = verdict.provenance
    assert said["actual_backend"] == said["stated"]["actual_backend"] == backend
    assert said["requested_backend"] == provider.name
    assert said["torch_version"] == str(torch.__version__)
    assert set(LEAF_OPERATORS) <= set(said["operators"])
    leaves = {op: ran_on for op, ran_on in said["operators"].items() if op in LEAF_OPERATORS}
    assert {op for op, ran_on in leaves.items() if ran_on != "reference"} == own


def test_the_stub_is_refused_before_any_operator_and_names_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for operator in (name for name in dir(StubProvider) if name.endswith(("_fwd", "_bwd"))):
        original = getattr(StubProvider, operator)

        def record(*args: object, operator: str = operator, **kwargs: object) -> None:
            ran.append(operator)

        vars(record).update(vars(original))
        monkeypatch.setattr(StubProvider, operator, record)
    verdict = judge_provider(StubProvider())
    assert ran == []
    assert not verdict.passed
    assert verdict.checks == ()
    assert verdict.provenance == {}
    assert all("fail-closed" in refusal for refusal in verdict.refusals)
    tasks = {"P1-1 (#14)", "P1-2 (#15)", "P1-3 (#16)", "P1-4 (#17)", "P1-5 (#18)"}
    assert set(verdict.pending) == tasks
    assert {"fixed_k_gemm_fwd", "fp32_gemm_rms_bwd"} <= set(verdict.pending["P1-2 (#15)"])


@pytest.mark.parametrize("options", [{"cases": ("packed_t99",)}, {"cases": ("production",)}, {"geometry": "flash"}])
def test_a_wrong_option_is_a_value_error(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"packed_t99|production|flash"):
        judge_provider(ReferenceProvider(), Options(**options))  # type: ignore[arg-type]


def test_seeded_cases_are_drawn_from_the_seed() -> None:
    listed = [available_cases(Options(seed=seed)) for seed in (10, 10, 11)]
    assert listed[0] == listed[1]
    fresh = [name for name in listed[0] if name.startswith("seed10_")]
    assert len(fresh) == 6
    assert not any(name.startswith("seed10_") for name in listed[2])
    verdict = judged(ReferenceProvider(), fresh[0], seed=10, repeat=1)
    assert problems(verdict) == []
    assert {check.case for check in verdict.checks if check.group == "boundaries"} == {fresh[0]}


def test_repeat_is_how_many_runs_are_compared() -> None:
    verdict = judged(ReferenceProvider(), "one_row", repeat=4)
    (repeated,) = [check for check in verdict.checks if check.name == "repeated runs"]
    assert (repeated.status, repeated.comparisons) == ("pass", 4)


def test_the_production_width_passes_on_few_tokens() -> None:
    options = Options(geometry="production", tokens=2, cases=("production_fused",), repeat=1)
    assert set(available_cases(options)) == {"production", "production_fused", "production_frozen", *OPERATORS}
    verdict = judge_provider(ReferenceProvider(), options)
    assert problems(verdict) == []
    assert verdict.passed


def test_a_captured_case_is_the_only_one() -> None:
    batch = make_batch("packed_t7_odd")
    case = Case("captured", batch, None, "forward only")
    verdict = judge_provider(ReferenceProvider(), Options(captured=case, repeat=1))
    assert problems(verdict) == []
    assert {check.case for check in verdict.checks if check.case} == {"captured"}
    (boundaries,) = [check for check in verdict.checks if check.group == "boundaries"]
    assert boundaries.comparisons == 10
    assert "forward only" in boundaries.detail


def test_the_users_tensors_are_left_alone() -> None:
    batch = make_batch("packed_t7_odd")
    grads = make_grads("packed_t7_odd", batch)
    before = [t.clone() for t in (batch.r_old, batch.y_sublayer, grads.d_r_new, grads.d_normalized)]
    judge_provider(HonestPost(), Options(captured=Case("captured", batch, grads, ""), repeat=1))
    after = (batch.r_old, batch.y_sublayer, grads.d_r_new, grads.d_normalized)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_judge_leaves_torch_as_it_was() -> None:
    def settings() -> tuple[object, ...]:
        deterministic = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), deterministic

    before = settings()
    judged(Honest(), "one_row")
    assert settings() == before
