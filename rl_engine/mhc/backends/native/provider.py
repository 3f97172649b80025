"""The native CPU backend as a provider: validate at the edge, then dispatch to the compiled kernels."""

from __future__ import annotations

from typing import Any

import torch

from rl_engine.mhc import block as composition
from rl_engine.mhc.backends.native import block, library
from rl_engine.mhc.backends.native.operators import NativeOperators
from rl_engine.mhc.block import Grads
from rl_engine.mhc.capabilities import require_capabilities
from rl_engine.mhc.contract import ORACLE_PROFILE, ROW_GEOMETRIES, GradBoundary, ResidualBatch
from rl_engine.mhc.operators import OperatorSet, Saved
from rl_engine.mhc.trace import MHCTrace

_Pre = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Saved]
_PreNorm = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Saved]


class NativeProvider(NativeOperators):
    """C++ kernels for the CPU: the bytes of the oracle, for both built-in profiles, at every instruction-set level.

    No result depends on threads, instruction set, alignment, strides or the caller's floating-point mode. The thread
    count is ``torch.get_num_threads()`` at each call; the GIL is released; calls from several threads and after a fork
    are safe. Inputs are never written, outputs never share storage with them.
    """

    name = "native"

    def __init__(self, numeric_profile: str = ORACLE_PROFILE) -> None:
        """The backend for one of the two built-in profiles (else ``ValueError``).

        ``NativeBackendUnavailable`` where the package was built without its compiled library.
        """
        super().__init__(numeric_profile)

    def capabilities(self) -> dict[str, Any]:
        """CPU, every mode of the contract, any width, replicated placement."""
        return {**composition.capabilities(), "backend": self.name, "devices": ["cpu"]}

    def provenance(self) -> dict[str, Any]:
        """The four required facts, the instruction-set level that runs, and the version of the C interface."""
        return {
            "requested_backend": self.name,
            "actual_backend": self.name,
            "numeric_profile": self.numeric_profile,
            "torch_version": str(torch.__version__),
            "isa": self.isa,
            "abi_version": library.ABI_VERSION,
        }

    def _gate(self, batch: ResidualBatch) -> None:
        """Refuse what is not declared. The declaration of this very class is known, and read without a detour."""
        contract = batch.contract
        served = (
            type(self) is NativeProvider
            and contract.numeric_profile == self.numeric_profile
            and contract.placement == "replicated"
            and contract.fusion_mode in composition.SUPPORTED_FUSION
            and contract.trainability in composition.SUPPORTED_TRAINABILITY
            and batch.row_geometry in ROW_GEOMETRIES
            and batch.r_old.device.type == "cpu"
        )
        if not served:
            require_capabilities(self, contract, batch)

    def mhc_pre_fwd(self, batch: ResidualBatch, ops: OperatorSet | None = None) -> _Pre:
        """``(hidden, pre, post, c, saved)`` fused; over another ``ops``, the canonical composition."""
        self._gate(batch)
        if ops is not None:
            return composition.mhc_pre_fwd(batch, ops)
        batch.validate()
        done = block.forward(self, batch, norm=False, mix=False)
        small = done.small
        return done.hidden, small["pre"], small["post"], small["c"], block.saved_of(batch, done)

    def mhc_pre_bwd(
        self,
        dhidden: torch.Tensor,
        dpost: torch.Tensor,
        dc: torch.Tensor,
        batch: ResidualBatch,
        saved: Saved,
        ops: OperatorSet | None = None,
    ) -> Grads:
        """``d_r_old`` and the controller gradients in one call; over another ``ops``, the canonical composition."""
        self._gate(batch)
        if ops is not None:
            return composition.mhc_pre_bwd(dhidden, dpost, dc, batch, saved, ops)
        batch.validate()
        return block.pre_backward(self, dhidden, dpost, dc, batch, saved)

    def mhc_pre_rmsnorm_fused_fwd(self, batch: ResidualBatch, ops: OperatorSet | None = None) -> _PreNorm:
        """``(hidden, normalized, residual, post, c, saved)``, fused; over another ``ops``, the composition."""
        self._gate(batch)
        if ops is not None:
            return composition.mhc_pre_rmsnorm_fused_fwd(batch, ops)
        batch.validate()
        done = block.forward(self, batch, norm=True, mix=False)
        assert done.normalized is not None and done.residual is not None
        norm = {"r": done.small["inv_rms"], "d": batch.contract.hidden}
        saved = {**block.saved_of(batch, done), "hidden": done.hidden, "norm": norm}
        return done.hidden, done.normalized, done.residual, done.small["post"], done.small["c"], saved

    def mhc_pre_rmsnorm_fused_bwd(
        self,
        d_normalized: torch.Tensor,
        d_residual: torch.Tensor,
        d_post: torch.Tensor,
        d_c: torch.Tensor,
        batch: ResidualBatch,
        saved: Saved,
        *,
        d_r_new: torch.Tensor | None = None,
        streams_dtype: torch.dtype = torch.float32,
    ) -> Grads:
        """``d_r_old``, ``d_gamma`` and the controller gradients of ``mhc_pre_rmsnorm_fused_fwd``, in one call.

        ``d_normalized[T, D]`` and ``d_residual[T, D]``, BF16 or FP32; FP32 ``d_post[T, 4]`` and ``d_c[T, 4, 4]``. With
        ``d_r_new[T, 4, D]``, which arrives at ``mhc_post``, ``d_r_old`` has that leg too, added last, as
        ``mhc_block_backward`` adds it. ``d_r_old`` is summed in FP32 and rounded once to ``streams_dtype``, FP32 or
        BF16; all else is FP32. Where ``saved`` lacks ``hidden``, it is computed again.
        """
        batch.validate()
        self._gate(batch)
        arriving = {"d_normalized": d_normalized, "d_residual": d_residual, "d_post": d_post, "d_c": d_c}
        return block.pre_norm_backward(self, arriving, batch, saved, d_r_new, streams_dtype)

    def mhc_block_forward(self, batch: ResidualBatch, trace: MHCTrace | None = None) -> tuple[torch.Tensor, Saved]:
        """``(r_new[T, 4, D], saved)`` of the whole block; with ``trace``, its boundaries are recorded.

        The errors of ``block.mhc_block_forward``, before anything runs.
        """
        batch.validate()
        composition.require_profile(trace, batch)
        self._gate(batch)
        done = block.forward(self, batch, norm=True, mix=True)
        assert done.r_new is not None
        norm = {"r": done.small["inv_rms"], "d": batch.contract.hidden}
        outputs = {"hidden": done.hidden, "normalized": done.normalized, "residual": done.residual, "norm": norm}
        saved = {**block.saved_of(batch, done), **outputs}
        composition.record_forward(trace, batch, saved, done.r_new)
        return done.r_new, saved

    def mhc_block_backward(
        self, batch: ResidualBatch, saved: Saved, grads: GradBoundary, trace: MHCTrace | None = None
    ) -> Grads:
        """The gradients ``block.GRAD_KEYS`` of the whole block; with ``trace``, its boundaries are recorded."""
        batch.validate()
        grads.validate(batch)
        composition.require_profile(trace, batch)
        self._gate(batch)
        result = block.backward(self, batch, saved, grads)
        composition.record_backward(trace, result)
        return result
