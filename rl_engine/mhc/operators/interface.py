"""The one signature set of the P1 operators: names, argument order, ranks, dtypes.

Everything that runs an operator (the reference, a backend, the acceptance command) reads it from here. In a shape,
a letter binds to the first size it meets and must hold for the rest of the call: T tokens, D hidden, K flattened
residual, M and N the rows of a GEMM. BF16 is exact storage; where an argument may be BF16 or FP32, BF16 is widened.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, Protocol

import torch

from rl_engine.mhc.checks import BF16, FP32, FP32_OR_BF16, check_tensor
from rl_engine.mhc.contract import (
    CONTROLLER_RMS,
    HC_MULT,
    P1_RMS,
    PROD_CONTROLLER_N,
    LayerContract,
    ResidualBatch,
)

Saved = dict[str, Any]
"""What a forward hands to its backward: a plain dict, so that any provider's operators fit together."""

Tensor = torch.Tensor


class OperatorSet(Protocol):
    """What composites call their parts through: a provider, or the oracle module itself.

    Shapes, dtypes and rounding points of each operator are documented where the reference implements it.
    """

    def hc_split_sinkhorn_fwd(
        self, h: Tensor, contract: LayerContract | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Saved]:
        """``(pre, post, c, saved)`` of the controller outputs ``h[T, 24]``."""
        ...

    def hc_split_sinkhorn_bwd(self, dpre: Tensor, dpost: Tensor, dc: Tensor, saved: Saved) -> Tensor:
        """``dh[T, 24]``."""
        ...

    def fp32_gemm_rms_fwd(
        self, x_flat: Tensor, weight: Tensor, eps: float, controller_rms: str = P1_RMS
    ) -> tuple[Tensor, Tensor, Saved]:
        """``(P[T, 24], r[T], saved)``. A set that serves P1's formula alone may lack the last parameter."""
        ...

    def fp32_gemm_rms_bwd(
        self, dp: Tensor, dr: Tensor, x_flat: Tensor, weight: Tensor, saved: Saved
    ) -> tuple[Tensor, Tensor]:
        """``(dX[T, K], dW[24, K])``."""
        ...

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        """``r_new[T, 4, D]``, BF16."""
        ...

    def mhc_post_bwd(
        self, dr_new: Tensor, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``(dR_old[T, 4, D], dy[T, D], dC[T, 4, 4], dPOST[T, 4])``."""
        ...

    def h_aggregate_fwd(self, pre: Tensor, r_old: Tensor) -> Tensor:
        """``hidden[T, D]``, BF16."""
        ...

    def h_aggregate_bwd(self, dh: Tensor, pre: Tensor, r_old: Tensor) -> tuple[Tensor, Tensor]:
        """``(dR[T, 4, D], dPRE[T, 4])``."""
        ...

    def mhc_pre_fwd(
        self, batch: ResidualBatch, ops: OperatorSet | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Saved]:
        """``(hidden, pre, post, c, saved)``."""
        ...

    def mhc_pre_bwd(
        self,
        dhidden: Tensor,
        dpost: Tensor,
        dc: Tensor,
        batch: ResidualBatch,
        saved: Saved,
        ops: OperatorSet | None = None,
    ) -> dict[str, Tensor | None]:
        """``d_r_old`` and the five controller gradients, the latter ``None`` under mixer-frozen."""
        ...

    def mhc_pre_rmsnorm_fused_fwd(
        self, batch: ResidualBatch, ops: OperatorSet | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Saved]:
        """``(hidden, normalized, residual, post, c, saved)``."""
        ...

    def rmsnorm_residual_fwd(self, x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Saved]:
        """``(y[T, D] BF16, residual[T, D] BF16, saved)``."""
        ...

    def rmsnorm_residual_bwd(
        self, dy: Tensor, d_residual: Tensor, x: Tensor, gamma: Tensor, saved: Saved
    ) -> tuple[Tensor, Tensor]:
        """``(dX[T, D], dGamma[D])``."""
        ...

    def fixed_k_gemm_fwd(self, x: Tensor, w: Tensor) -> Tensor:
        """FP32 ``[M, N]``."""
        ...

    def fixed_k_gemm_bwd(self, dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """``(dX[M, K], dW[N, K])``."""
        ...


COMPOSITE_OPERATORS = ("mhc_pre_fwd", "mhc_pre_bwd", "mhc_pre_rmsnorm_fused_fwd")
OPERATORS = tuple(name for name in vars(OperatorSet) if name.endswith(("_fwd", "_bwd")))
LEAF_OPERATORS = tuple(name for name in OPERATORS if name not in COMPOSITE_OPERATORS)


def parameters_of(operator: Any) -> tuple[str, ...]:
    """The parameter names of a function or method in order, without ``self``."""
    return tuple(name for name in inspect.signature(operator).parameters if name != "self")


class TensorArgument(NamedTuple):
    """The shape of a tensor argument, in letters and sizes, and the dtypes it may have."""

    dims: tuple[str | int, ...]
    dtypes: tuple[torch.dtype, ...]


_N = PROD_CONTROLLER_N
_STREAMS = TensorArgument(("T", HC_MULT, "D"), BF16)
_ROWS = TensorArgument(("T", "D"), BF16)
_ROWS_GRAD = TensorArgument(("T", "D"), FP32_OR_BF16)
_LOGITS = TensorArgument(("T", _N), FP32)
_VECTOR4 = TensorArgument(("T", HC_MULT), FP32)
_COMB = TensorArgument(("T", HC_MULT, HC_MULT), FP32)
_X_FLAT = TensorArgument(("T", "K"), FP32_OR_BF16)
_WEIGHT = TensorArgument((_N, "K"), FP32)
_GAMMA = TensorArgument(("D",), FP32_OR_BF16)
_GEMM_X = TensorArgument(("M", "K"), FP32_OR_BF16)
_GEMM_W = TensorArgument(("N", "K"), FP32_OR_BF16)

TENSOR_ARGUMENTS: dict[str, dict[str, TensorArgument]] = {
    "hc_split_sinkhorn_fwd": {"h": _LOGITS},
    "hc_split_sinkhorn_bwd": {"dpre": _VECTOR4, "dpost": _VECTOR4, "dc": _COMB},
    "fp32_gemm_rms_fwd": {"x_flat": _X_FLAT, "weight": _WEIGHT},
    "fp32_gemm_rms_bwd": {"dp": _LOGITS, "dr": TensorArgument(("T",), FP32), "x_flat": _X_FLAT, "weight": _WEIGHT},
    "mhc_post_fwd": {"r_old": _STREAMS, "y": _ROWS, "c": _COMB, "post": _VECTOR4},
    "mhc_post_bwd": {
        "dr_new": TensorArgument(("T", HC_MULT, "D"), FP32_OR_BF16),
        "r_old": _STREAMS,
        "y": _ROWS,
        "c": _COMB,
        "post": _VECTOR4,
    },
    "h_aggregate_fwd": {"pre": _VECTOR4, "r_old": _STREAMS},
    "h_aggregate_bwd": {"dh": _ROWS_GRAD, "pre": _VECTOR4, "r_old": _STREAMS},
    "mhc_pre_bwd": {"dhidden": _ROWS_GRAD, "dpost": _VECTOR4, "dc": _COMB},
    "rmsnorm_residual_fwd": {"x": _ROWS, "gamma": _GAMMA},
    "rmsnorm_residual_bwd": {"dy": _ROWS_GRAD, "d_residual": _ROWS_GRAD, "x": _ROWS, "gamma": _GAMMA},
    "fixed_k_gemm_fwd": {"x": _GEMM_X, "w": _GEMM_W},
    "fixed_k_gemm_bwd": {"dy": TensorArgument(("M", "N"), FP32_OR_BF16), "x": _GEMM_X, "w": _GEMM_W},
}


def check_arguments(operator: str, **tensors: object) -> dict[str, int]:
    """Check the tensor arguments of an operator against its signature and return the sizes bound to the letters.

    All tensors must be on one device. ``TypeError`` for a non-tensor or dtype, ``ValueError`` for rank, shape or
    device; the message starts with ``operator: argument``.
    """
    sizes: dict[str, int] = {}
    device: torch.device | None = None
    for name, argument in TENSOR_ARGUMENTS[operator].items():
        value, field = tensors[name], f"{operator}: {name}"
        legend = "[" + ", ".join(map(str, argument.dims)) + "]"
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{field}: got {type(value).__name__}, want a torch.Tensor {legend}")
        if value.dim() != len(argument.dims):
            raise ValueError(f"{field}: got shape {tuple(value.shape)}, want {legend}")
        for dim, size in zip(argument.dims, value.shape, strict=True):
            if isinstance(dim, str):
                sizes.setdefault(dim, int(size))
        wanted = [sizes[dim] if isinstance(dim, str) else dim for dim in argument.dims]
        check_tensor(field, value, wanted, argument.dtypes, device, legend)
        device = value.device
    return sizes


def check_controller_rms(operator: str, controller_rms: str) -> None:
    """Raise ``ValueError`` unless the formula of the controller's scale is one of ``CONTROLLER_RMS``."""
    if controller_rms not in CONTROLLER_RMS:
        raise ValueError(
            f"{operator}: controller_rms: got {controller_rms!r}, want one of: {', '.join(CONTROLLER_RMS)}"
        )


def saved_controller_rms(operator: str, saved: Saved) -> str:
    """The formula that the forward behind ``saved`` ran, which ``saved`` names where it is not P1's."""
    if not isinstance(saved, dict):
        raise ValueError(f"{operator}: saved: got {type(saved).__name__}, want the dict of the forward")
    formula = saved.get("controller_rms", P1_RMS)
    check_controller_rms(f"{operator}: saved", formula)
    return str(formula)


def check_contract(operator: str, contract: LayerContract | None, numeric_profile: str) -> None:
    """Raise ``ValueError`` unless a given contract is valid and names the profile of the operator set."""
    if contract is None:
        return
    contract.validate()
    if contract.numeric_profile != numeric_profile:
        raise ValueError(
            f"{operator}: contract.numeric_profile: got {contract.numeric_profile!r}, want {numeric_profile!r}"
        )
