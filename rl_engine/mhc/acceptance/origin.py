"""Where the bytes came from: published hashes for the oracle, silent fallbacks and provenance for the candidate."""

from __future__ import annotations

import platform
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from rl_engine.mhc.acceptance.judge import guarded
from rl_engine.mhc.acceptance.observed import Observed
from rl_engine.mhc.acceptance.verdict import Check, Divergence
from rl_engine.mhc.contract import CONTROLLER_RMS, ORACLE_PROFILE, P1_RMS
from rl_engine.mhc.fixtures import GOLDEN_CASES, golden_manifest, load_manifest, moved_hashes
from rl_engine.mhc.provider import REFERENCE_BACKEND, ReferenceProvider

GOLDEN_GROUP = "golden"
GROUP = "provenance"
REQUIRED_PROVENANCE = ("requested_backend", "actual_backend", "numeric_profile", "torch_version")


def environment(device: torch.device) -> dict[str, str]:
    """What the run depended on, read from the machine."""
    facts = {
        "rl_engine.mhc": _version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def _version() -> str:
    try:
        return version("rl-engine-mhc")
    except PackageNotFoundError:
        return "a checkout that is not installed"


def provenance(observed: Observed) -> dict[str, Any]:
    """The provider's own statement, beside what was observed to run."""
    stated, _ = guarded(observed.provider.provenance)
    return {
        "stated": {key: str(stated.get(key)) for key in REQUIRED_PROVENANCE} if isinstance(stated, dict) else {},
        "requested_backend": observed.name,
        "actual_backend": observed.actual_backend(),
        "numeric_profile": observed.numeric_profile,
        "torch_version": str(torch.__version__),
        "operators": observed.operator_backends(),
    }


def golden_checks(device: torch.device, numeric_profile: str, formulas: Collection[str]) -> list[Check]:
    """``golden_check`` of P1's formula of the controller's scale, and of those of ``formulas`` that have hashes."""
    others = [formula for formula in CONTROLLER_RMS if formula != P1_RMS and formula in formulas]
    wanted = [P1_RMS, *(others if numeric_profile in GOLDEN_CASES else [])]
    return [golden_check(device, numeric_profile, formula) for formula in wanted]


def golden_check(device: torch.device, numeric_profile: str, controller_rms: str = P1_RMS) -> Check:
    """The oracle's bytes on this machine against the published ones.

    Those of the oracle profile were made with torch 2.13 on x86-64 with AVX2 or AVX-512, as it takes exp, sigmoid,
    sqrt and rsqrt from the library. Anywhere else a difference is a note: the candidate is judged by the oracle of
    its own machine. Those of the portable profile hold on every machine.
    """
    name = "the oracle's bytes are the published ones"
    if controller_rms != P1_RMS:
        name += f" under {controller_rms}"
    if device.type != "cpu" or numeric_profile not in GOLDEN_CASES:
        return Check(GOLDEN_GROUP, name, "", "note", 0, f"nothing is published for {numeric_profile} on {device.type}")
    published = load_manifest(numeric_profile=numeric_profile, controller_rms=controller_rms)
    here = golden_manifest(numeric_profile=numeric_profile, controller_rms=controller_rms)
    total = sum(len(hashes) for hashes in published["cases"].values())
    moved = moved_hashes(published, here)
    detail = f"{total - len(moved)} of {total} hashes"
    if not moved:
        return Check(GOLDEN_GROUP, name, "", "pass", total, detail)
    detail += f"; moved: {', '.join(moved[:6])}{', ...' if len(moved) > 6 else ''}"
    if numeric_profile == ORACLE_PROFILE and not _is_home():
        detail += "; published for torch 2.13 on x86-64 with AVX2 or AVX-512"
        return Check(GOLDEN_GROUP, name, "", "note", 0, detail)
    found = tuple(Divergence(key.partition("/")[2], "bytes", f"{key}: not the published hash") for key in moved)
    return Check(GOLDEN_GROUP, name, "", "fail", total, detail, found)


def origin_checks(observed: Observed) -> list[Check]:
    """No silent fallback, claims of its own, and a statement that agrees with what ran."""
    fallbacks = [f"{op} ran the reference's {', '.join(inside)}" for op, inside in observed.fallbacks.items()]
    checks = [_check("claimed operators are the provider's own", fallbacks, len(observed.claimed))]
    if type(observed.provider) is not ReferenceProvider:
        checks.append(_check("the candidate is not the reference", _reference_in_disguise(observed)))
    return [*checks, _check("the provider states what ran", _misstated(observed), len(REQUIRED_PROVENANCE))]


def _reference_in_disguise(observed: Observed) -> list[str]:
    names = {"name": observed.name, "backend": observed.capabilities().get("backend")}
    wrong = [
        f"{what}: got {name!r}, which is the reference's" for what, name in names.items() if name == REFERENCE_BACKEND
    ]
    return wrong if observed.claimed else [f"{observed.name!r} claims no operator: it is the reference by another name"]


def _misstated(observed: Observed) -> list[str]:
    stated, error = guarded(observed.provider.provenance)
    if error is not None:
        return [f"provenance: raised {error.message}"]
    if not isinstance(stated, dict):
        return [f"provenance: got {type(stated).__name__}, want a dict"]
    truth = {
        "requested_backend": observed.name,
        "actual_backend": observed.actual_backend(),
        "numeric_profile": observed.numeric_profile,
        "torch_version": str(torch.__version__),
    }
    return [
        f"{key}: got {stated.get(key)!r}, want {value!r}" for key, value in truth.items() if stated.get(key) != value
    ]


def _is_home() -> bool:
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        platform.machine() == "x86_64"
        and capability in ("AVX2", "AVX512")
        and str(torch.__version__).startswith("2.13.")
    )


def _check(name: str, wrong: list[str], comparisons: int = 1) -> Check:
    detail = "; ".join(wrong)
    found = (Divergence("provenance", "provenance", detail),) if wrong else ()
    return Check(GROUP, name, "", "fail" if wrong else "pass", comparisons, detail, found)
