"""Providers that declare too little or too much, name their parameters otherwise, or leave their gate open."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from rl_engine.mhc import block
from rl_engine.mhc.contract import ResidualBatch
from tests.planted import kernels
from tests.planted.defect import REFUSED, OwnPost, Planted, planted
from tests.planted.honest import Grads
from tests.planted.kernels import Saved

# --- declarations ---


class Declared(OwnPost):
    """A declaration with some of its entries replaced; an entry of ``...`` is left out."""

    entries: ClassVar[dict[str, Any]] = {}

    def capabilities(self) -> Any:
        merged = {**super().capabilities(), **self.entries}
        return {key: value for key, value in merged.items() if value is not ...}


@planted("", REFUSED, "one_row", says=("placements", "fail-closed"))
class NoPlacements(Declared):
    """The declaration has no placements."""

    entries: ClassVar[dict[str, Any]] = {"placements": ...}


@planted("", REFUSED, "one_row", says=("trainability", "fail-closed"))
class EmptyTrainability(Declared):
    """The declaration lists no trainability."""

    entries: ClassVar[dict[str, Any]] = {"trainability": []}


@planted("", REFUSED, "one_row", says=("fusion_modes", "fail-closed"))
class FusionAsText(Declared):
    """The fusion modes are one string, in which a substring would be found."""

    entries: ClassVar[dict[str, Any]] = {"fusion_modes": "unfused, fused-pre-norm"}


@planted("", REFUSED, "one_row", says=("devices", "fail-closed"))
class OtherDevice(Declared):
    """The declaration serves another device."""

    entries: ClassVar[dict[str, Any]] = {"devices": ["cuda"]}


@planted("", REFUSED, "one_row", says=("hidden", "fail-closed"))
class OtherWidth(Declared):
    """The declaration serves another width."""

    entries: ClassVar[dict[str, Any]] = {"hidden": [4096]}


@planted("", REFUSED, "one_row", says=("fail-closed",))
class NoDeclaration(OwnPost):
    """The declaration is None."""

    def capabilities(self) -> Any:
        return None


@planted("", REFUSED, "one_row", says=("numeric_profile",))
class UnknownProfile(OwnPost):
    """The provider names a numeric profile that does not exist."""

    def __init__(self) -> None:
        super().__init__()
        self.numeric_profile = "fast-bf16-v0"


@planted("capabilities", "fail-closed", "one_row", says=("tp-sharded",))
class DeclaresSharding(Declared):
    """The declaration serves a placement for which no reference exists."""

    entries: ClassVar[dict[str, Any]] = {"placements": ["replicated", "tp-sharded"]}


@planted("capabilities", "fail-closed", "one_row", says=("ragged",))
class DeclaresGeometry(Declared):
    """The declaration serves a row geometry that the contract does not know."""

    entries: ClassVar[dict[str, Any]] = {"geometry": ["one-row", "packed", "ragged"]}


# --- signatures and gates ---


@planted("signature", "fail-closed", "one_row", says=("mhc_post_fwd",))
class RenamedParameter(Planted):
    """An operator calls its parameter x where the protocol says y."""

    def mhc_post_fwd(self, r_old: Tensor, x: Tensor, c: Tensor, post: Tensor) -> Tensor:
        return kernels.mhc_post_fwd(r_old, x, c, post)


@planted("signature", "fail-closed", "one_row", says=("h_aggregate_fwd",))
class SwappedParameters(Planted):
    """An operator names its parameters in another order than it uses them."""

    def h_aggregate_fwd(self, r_old: Tensor, pre: Tensor) -> Tensor:
        return kernels.h_aggregate_fwd(r_old, pre)


@planted("mhc_pre_fwd", "fail-closed", "one_row", says=("accepted",))
class UngatedForward(Planted):
    """A composite of its own accepts modes that nobody declared."""

    def mhc_pre_fwd(self, batch: ResidualBatch, ops: Any = None) -> tuple[Any, ...]:
        replicated = batch.contract.with_mode("placement", "replicated")
        plain = replicated.with_mode("fusion_mode", "unfused").with_mode("trainability", "full")
        return block.mhc_pre_fwd(_with(batch, plain), self if ops is None else ops)


@planted("mhc_pre_bwd", "fail-closed", "one_row", says=("accepted",))
class UngatedBackward(Planted):
    """A backward composite of its own accepts modes that nobody declared."""

    def mhc_pre_bwd(
        self, dhidden: Tensor, dpost: Tensor, dc: Tensor, batch: ResidualBatch, saved: Saved, ops: Any = None
    ) -> Grads:
        modes = {"placement": "replicated", "fusion_mode": "unfused"}
        contract = batch.contract
        for field, mode in modes.items():
            contract = contract.with_mode(field, mode)
        if contract.trainability != "mixer-frozen":
            contract = contract.with_mode("trainability", "full")
        return block.mhc_pre_bwd(dhidden, dpost, dc, _with(batch, contract), saved, self if ops is None else ops)


@planted("mhc_pre_fwd", "fail-closed", "one_row", says=("first",))
class GatedTooLate(Planted):
    """A composite of its own checks the modes after its first operator."""

    def mhc_pre_fwd(self, batch: ResidualBatch, ops: Any = None) -> tuple[Any, ...]:
        parts = self if ops is None else ops
        parts.h_aggregate_fwd(torch.ones(1, 4), torch.ones(1, 4, 2, dtype=torch.bfloat16))
        return super().mhc_pre_fwd(batch, ops)


def _with(batch: ResidualBatch, contract: Any) -> ResidualBatch:
    return ResidualBatch(
        batch.r_old, batch.y_sublayer, batch.controller, batch.norm, batch.token_id, contract, batch.row_geometry
    )
