"""Providers that are not what they say: fallbacks, claims, provenance."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_engine.mhc import block, oracle
from rl_engine.mhc.contract import ResidualBatch
from rl_engine.mhc.provider import ReferenceProvider
from tests.planted import kernels
from tests.planted.defect import OwnPost, Planted, planted
from tests.planted.honest import Grads
from tests.planted.kernels import Saved, kernel

CLAIMED = {"case": "one_row", "says": ("mhc_post_fwd ran the reference's mhc_post_fwd",)}


# --- the reference in disguise ---


@planted("provenance", "provenance", **CLAIMED)
class FallsBackToOracle(Planted):
    """A claimed operator calls the oracle."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        return oracle.mhc_post_fwd(r_old, y, c, post)


@planted("provenance", "provenance", **CLAIMED)
class FallsBackToAProvider(Planted):
    """A claimed operator calls a reference provider."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        return ReferenceProvider().mhc_post_fwd(r_old, y, c, post)


@planted("provenance", "provenance", **CLAIMED)
class FallsBackToItsBase(Planted):
    """A claimed operator calls super()."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        return super().mhc_post_fwd(r_old, y, c, post)


@planted("provenance", "provenance", **CLAIMED)
class FallsBackInAThread(Planted):
    """A claimed operator calls the oracle on another thread."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        results: list[Tensor] = []
        thread = threading.Thread(target=lambda: results.append(oracle.mhc_post_fwd(r_old, y, c, post)))
        thread.start()
        thread.join()
        return results[0]


@planted("provenance", "provenance", "packed_t7_odd", says=("mhc_post_fwd ran the reference's mhc_post_fwd",))
class FallsBackAfterAFailure(Planted):
    """A kernel that fails for more than one row is caught, and the oracle answers."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        try:
            if len(y) > 1:
                raise RuntimeError("unsupported shape")
            return kernels.mhc_post_fwd(r_old, y, c, post)
        except RuntimeError:
            return oracle.mhc_post_fwd(r_old, y, c, post)


@planted(
    "provenance", "provenance", "mixer_frozen", hidden_in="packed_t7_odd", says=("mhc_pre_bwd ran the reference's",)
)
class FallsBackInAComposite(Planted):
    """A claimed composite is the canonical one over the oracle where the mixer is frozen."""

    def mhc_pre_bwd(
        self, dhidden: Tensor, dpost: Tensor, dc: Tensor, batch: ResidualBatch, saved: Saved, ops: Any = None
    ) -> Grads:
        frozen = batch.contract.trainability == "mixer-frozen" and batch.tokens == 16
        return block.mhc_pre_bwd(dhidden, dpost, dc, batch, saved, None if frozen else self._gated(batch, ops))


@planted("provenance", "provenance", "one_row", says=("by another name",))
class ReferenceByAnotherName(Planted):
    """A class that overrides nothing."""

    name = "fast"


@planted("provenance", "provenance", "one_row", says=("ran the reference's",))
class ClaimsEverything(Planted):
    """The declaration claims operators that the class takes from the reference."""

    name = "fast"
    mhc_post_fwd = kernel(kernels.mhc_post_fwd)

    def capabilities(self) -> dict[str, Any]:
        return {**super().capabilities(), "operators": ["mhc_post_fwd", "mhc_post_bwd", "rmsnorm_residual_fwd"]}


@planted("provenance", "provenance", "one_row")
class CalledReference(Planted):
    """Kernels of its own under the reference's name, so that nobody can tell them apart."""

    mhc_post_fwd = kernel(kernels.mhc_post_fwd)

    def __init__(self) -> None:
        super().__init__()
        self.name = "reference"


# --- provenance ---


class Stated(OwnPost):
    """Provenance with some of its facts typed in."""

    facts: ClassVar[dict[str, Any]] = {}

    def provenance(self) -> dict[str, Any]:
        return {**super().provenance(), **self.facts}


@planted("provenance", "provenance", "one_row", says=("actual_backend",))
class TypedInBackend(Stated):
    """actual_backend is a constant that leaves the reference out."""

    facts: ClassVar[dict[str, Any]] = {"actual_backend": "planted"}


@planted("provenance", "provenance", "one_row", says=("torch_version",))
class TypedInVersion(Stated):
    """torch_version is a constant from another day."""

    facts: ClassVar[dict[str, Any]] = {"torch_version": "2.4.0"}


@planted("provenance", "provenance", "one_row", says=("requested_backend",))
class TypedInRequest(Stated):
    """requested_backend is not the backend that was asked for."""

    facts: ClassVar[dict[str, Any]] = {"requested_backend": "reference"}


@planted("provenance", "provenance", "one_row", says=("torch_version",))
class ObjectForVersion(Stated):
    """torch_version is an object that no JSON document can hold."""

    facts: ClassVar[dict[str, Any]] = {"torch_version": torch.device("cpu")}


@planted("provenance", "provenance", "one_row", says=("provenance",))
class NoProvenance(OwnPost):
    """Provenance is None."""

    def provenance(self) -> None:  # type: ignore[override]
        return None


@planted("provenance", "provenance", "one_row", says=("provenance",))
class ProvenanceCrash(OwnPost):
    """Provenance raises."""

    def provenance(self) -> dict[str, Any]:
        raise RuntimeError("no device")
