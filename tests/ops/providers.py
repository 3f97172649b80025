"""Providers that the tests register: with the optional methods, with a record of its calls, with a planted defect."""

from __future__ import annotations

from typing import Any

import torch

from rl_engine.mhc.backends.native.provider import NativeProvider
from rl_engine.mhc.contract import CONTROLLER_RMS
from rl_engine.mhc.provider import ReferenceProvider

Tensor = torch.Tensor


class Recording(ReferenceProvider):
    """The reference, and the names of what was called, with the trainability of the batch where there is one."""

    name = "recording"

    def __init__(self, numeric_profile: str) -> None:
        super().__init__(numeric_profile)
        self.seen: list[str] = []

    def capabilities(self) -> dict[str, Any]:
        return {**super().capabilities(), "controller_rms": list(CONTROLLER_RMS)}

    def mhc_pre_bwd(self, dhidden: Tensor, dpost: Tensor, dc: Tensor, batch: Any, saved: Any, ops: Any = None) -> Any:
        self.seen.append(f"mhc_pre_bwd {batch.contract.trainability}")
        return super().mhc_pre_bwd(dhidden, dpost, dc, batch, saved, ops)

    def mhc_post_bwd(self, *args: Any) -> Any:
        self.seen.append("mhc_post_bwd")
        return super().mhc_post_bwd(*args)


class FusedBackward(Recording):
    """With the optional methods: the backward of the first half of a block, and that of the gates alone."""

    name = "fused-backward"

    def mhc_pre_rmsnorm_fused_bwd(
        self,
        d_normalized: Tensor,
        d_residual: Tensor,
        d_post: Tensor,
        d_c: Tensor,
        batch: Any,
        saved: Any,
        *,
        d_r_new: Tensor | None = None,
        streams_dtype: torch.dtype = torch.float32,
    ) -> Any:
        hidden = ReferenceProvider.h_aggregate_fwd(self, saved["pre"], batch.r_old)
        d_hidden, d_gamma = self.rmsnorm_residual_bwd(d_normalized, d_residual, hidden, batch.norm.gamma, saved["norm"])
        found = ReferenceProvider.mhc_pre_bwd(self, d_hidden, d_post, d_c, batch, saved)
        d_r = found["d_r_old"]
        assert d_r is not None
        if d_r_new is not None:
            d_r = (
                d_r
                + ReferenceProvider.mhc_post_bwd(
                    self, d_r_new, batch.r_old, batch.y_sublayer, saved["c"], saved["post"]
                )[0]
            )
        self.seen.append("mhc_pre_rmsnorm_fused_bwd")
        return {**found, "d_r_old": d_r.to(streams_dtype), "d_gamma": d_gamma}

    def mhc_post_gate_bwd(self, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.seen.append("mhc_post_gate_bwd")
        return ReferenceProvider.mhc_post_bwd(self, *args)[1:]


class _Defective(NativeProvider):
    """The native provider; what subclasses get wrong is one element, by one ULP or two."""

    @staticmethod
    def _spoilt(t: Tensor) -> Tensor:
        bits = t.clone().view(torch.int32)
        bits.view(-1)[0] += 1 << 16  # one ULP of BF16, so that it survives a rounding
        return bits.view(torch.float32)


class WrongGate(_Defective):
    name = "wrong-gate"

    def mhc_post_bwd(self, *args: Any) -> Any:
        d_r, dy, d_c, d_post = super().mhc_post_bwd(*args)
        return d_r, dy, self._spoilt(d_c), d_post

    def mhc_post_gate_bwd(self, *args: Any) -> Any:
        return self.mhc_post_bwd(*args)[1:]


class WrongAggregate(_Defective):
    name = "wrong-aggregate"

    def h_aggregate_bwd(self, *args: Any) -> Any:
        d_r, d_pre = super().h_aggregate_bwd(*args)
        return self._spoilt(d_r), d_pre


class WrongForward(_Defective):
    name = "wrong-forward"

    def hc_split_sinkhorn_fwd(self, h: Tensor, contract: Any = None) -> Any:
        pre, post, c, saved = super().hc_split_sinkhorn_fwd(h, contract)
        return pre, self._spoilt(post), c, saved


class Aliasing(ReferenceProvider):
    """Returns its input where the contract wants a copy."""

    name = "aliasing"

    def rmsnorm_residual_fwd(self, x: Tensor, gamma: Tensor, eps: float) -> Any:
        y, _, saved = super().rmsnorm_residual_fwd(x, gamma, eps)
        return y, x, saved


class OtherDevice(ReferenceProvider):
    name = "other-device"

    def capabilities(self) -> dict[str, Any]:
        return {**super().capabilities(), "devices": ["cuda"]}


class OtherProfile(ReferenceProvider):
    """Serves one profile, whatever is asked for."""

    name = "other-profile"

    def __init__(self) -> None:
        super().__init__()
