"""The P1 contract as frozen types: shapes, dtypes, frozen constants and modes, validated batches.

A ``ResidualBatch`` holds everything that one block boundary reads, a ``GradBoundary`` the gradients that arrive at it.
Both are validated once, where they enter. A wrong dtype is a ``TypeError``; a wrong shape, mode, frozen value or
fingerprint a ``ValueError``; a mode that somebody does not support a ``NotImplementedError`` that says "fail-closed".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch

from rl_engine.mhc import checks
from rl_engine.mhc.bits import tensor_bytes, tensor_sha256
from rl_engine.mhc.checks import check_tensor
from rl_engine.mhc.elementary import ORACLE_PROFILE, PORTABLE_PROFILE
from rl_engine.mhc.profiles import get_profile
from rl_engine.mhc.reduction import HC_MULT
from rl_engine.mhc.tensor_file import read_tensor_file, write_tensor_file

SCHEMA_VERSION = "p1-mhc-layer-v1"
PROD_HIDDEN = 4096
PROD_CONTROLLER_N = 24
SINKHORN_ITERS = 20
MHC_EPS = 1e-6
RMSNORM_EPS = 1e-6
PRE_SLICE = slice(0, 4)
POST_SLICE = slice(4, 8)
COMB_SLICE = slice(8, 24)
PLACEMENTS = ("replicated", "tp-sharded", "cp-token-sharded")
ROW_GEOMETRIES = ("one-row", "packed")
FUSION_MODES = ("unfused", "fused-pre-norm")
CANONICAL_FUSION_MODE = "unfused"
TRAINABILITY_MODES = ("full", "mixer-frozen")
CONTROLLER_RMS = ("inverse-rms-plus-eps", "rsqrt-mean-plus-eps")
"""The controller's scale of a row: P1's ``1 / (sqrt(sum x^2) / sqrt(K) + eps)``, and ``rsqrt(mean x^2 + eps)``, which
the released DeepSeek-V4 computes."""
P1_RMS, RELEASED_RMS = CONTROLLER_RMS
GAMMA_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_FROZEN = {
    "hc_mult": HC_MULT,
    "controller_n": PROD_CONTROLLER_N,
    "sinkhorn_iters": SINKHORN_ITERS,
    "mhc_eps": MHC_EPS,
    "rmsnorm_eps": RMSNORM_EPS,
    "schema_version": SCHEMA_VERSION,
}
T = TypeVar("T", "ControllerParams", "NormParams", "GradBoundary")

_BATCH_KIND = "rl_engine.mhc/residual-batch/v1"
_GRADS_KIND = "rl_engine.mhc/grad-boundary/v1"


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, want one of: {', '.join(allowed)}")


def _sha256_of(*parts: object) -> str:
    """SHA-256 of the parts as one JSON list, which keeps their borders and types apart."""
    encoded = json.dumps(parts, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    return hashlib.sha256(encoded).hexdigest()


@dataclass(frozen=True)
class LayerContract:
    """The arithmetic of one block boundary. The defaults are the production constants.

    ``hidden`` is any positive D, ``layer_index`` any non-negative integer; the modes come from the tuples of this
    module; all else is frozen, and ``validate`` says so. ``numeric_profile`` names a registered profile,
    ``gamma_dtype`` the storage of the RMSNorm weight, ``controller_rms`` the formula of the controller's scale.
    """

    hidden: int = PROD_HIDDEN
    hc_mult: int = HC_MULT
    controller_n: int = PROD_CONTROLLER_N
    sinkhorn_iters: int = SINKHORN_ITERS
    mhc_eps: float = MHC_EPS
    rmsnorm_eps: float = RMSNORM_EPS
    layer_index: int = 0
    placement: str = "replicated"
    fusion_mode: str = CANONICAL_FUSION_MODE
    trainability: str = "full"
    schema_version: str = SCHEMA_VERSION
    numeric_profile: str = ORACLE_PROFILE
    gamma_dtype: str = "bfloat16"
    controller_rms: str = P1_RMS

    def with_mode(self, field_name: str, mode: str) -> LayerContract:
        """A copy with that field, one of those that hold a string, set to ``mode``, which is not validated."""
        changed: dict[str, Any] = {field_name: mode}
        return dataclasses.replace(self, **changed)

    @property
    def flat_k(self) -> int:
        """K = 4·D, the length of one token's flattened residual (stream-major)."""
        return self.hc_mult * self.hidden

    def validate(self) -> None:
        """Raise ``ValueError`` unless every field holds a value that the contract allows."""
        for name, lowest in (("hidden", 1), ("layer_index", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < lowest:
                raise ValueError(f"contract.{name}: got {value!r}, want an integer of at least {lowest}")
        for name, frozen in _FROZEN.items():
            value = getattr(self, name)
            if type(value) is not type(frozen) or value != frozen:
                raise ValueError(f"contract.{name}: got {value!r}, want {frozen!r} (frozen)")
        _one_of("contract.placement", self.placement, PLACEMENTS)
        _one_of("contract.fusion_mode", self.fusion_mode, FUSION_MODES)
        _one_of("contract.trainability", self.trainability, TRAINABILITY_MODES)
        _one_of("contract.gamma_dtype", self.gamma_dtype, tuple(GAMMA_DTYPES))
        _one_of("contract.controller_rms", self.controller_rms, CONTROLLER_RMS)
        if not isinstance(self.numeric_profile, str):
            raise ValueError(f"contract.numeric_profile: got {self.numeric_profile!r}, want a profile's id")
        try:
            get_profile(self.numeric_profile)
        except ValueError as error:
            raise ValueError(f"contract.{error}") from None

    def assert_production(self) -> None:
        """``validate``, and D must be the production width (4096)."""
        self.validate()
        if self.hidden != PROD_HIDDEN:
            raise ValueError(f"contract.hidden: got {self.hidden}, want {PROD_HIDDEN} (production)")

    def fingerprint(self) -> str:
        """SHA-256 over every field that can move a byte, which is all but ``layer_index``.

        The encoding is a JSON list of (name, type, value) with floats in hexadecimal, so no two field lists share
        bytes. ``controller_rms`` is in it where it is not P1's: the fingerprints of P1 are older than that field.
        """
        items = []
        for spec in sorted(fields(self), key=lambda f: f.name):
            value = getattr(self, spec.name)
            if spec.name != "layer_index" and (spec.name, value) != ("controller_rms", P1_RMS):
                items.append([spec.name, type(value).__name__, value.hex() if isinstance(value, float) else value])
        return _sha256_of("layer-contract", items)

    def to_dict(self) -> dict[str, Any]:
        """The fields as a JSON-ready dict."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerContract:
        """The contract of ``to_dict``; a missing or unknown field is a ``ValueError``.

        Without ``controller_rms``, as it was written before there was a choice, it is P1's.
        """
        names = {spec.name for spec in fields(cls)}
        if not isinstance(values, Mapping):
            raise ValueError(f"contract: got {type(values).__name__}, want a mapping of fields")
        values = {"controller_rms": P1_RMS, **values}
        if set(values) != names:
            odd = ", ".join(sorted(names ^ set(values)))
            raise ValueError(f"contract: missing or unknown fields: {odd}")
        contract = cls(**values)
        contract.validate()
        return contract


@dataclass(frozen=True, eq=False)
class ControllerParams:
    """The mHC controller: ``weight[24, K]``, three scalar alphas ``[1]`` and ``bias[24]``, all FP32."""

    weight: torch.Tensor
    alpha_pre: torch.Tensor
    alpha_post: torch.Tensor
    alpha_res: torch.Tensor
    bias: torch.Tensor

    @property
    def alphas(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(alpha_pre, alpha_post, alpha_res)``, each FP32 ``[1]``."""
        return self.alpha_pre, self.alpha_post, self.alpha_res

    def expanded_alpha(self, contract: LayerContract) -> torch.Tensor:
        """FP32 ``[24]``: each alpha repeated over its segment of the controller outputs."""
        expanded = torch.empty(contract.controller_n, dtype=torch.float32, device=self.bias.device)
        for segment, alpha in zip((PRE_SLICE, POST_SLICE, COMB_SLICE), self.alphas, strict=True):
            expanded[segment] = alpha.detach()
        return expanded

    def validate(self, contract: LayerContract) -> None:
        """Raise unless every tensor has its shape, FP32, and the device of ``weight``."""
        n = contract.controller_n
        check_tensor("controller.weight", self.weight, (n, contract.flat_k), checks.FP32, legend="[24, K]")
        device = self.weight.device
        for name in ("alpha_pre", "alpha_post", "alpha_res"):
            check_tensor(f"controller.{name}", getattr(self, name), (1,), checks.FP32, device)
        check_tensor("controller.bias", self.bias, (n,), checks.FP32, device)

    def fingerprint(self) -> str:
        """SHA-256 over name, dtype, shape and bytes of every tensor."""
        return _sha256_of("controller", _described(self))

    def to(self, device: torch.device | str) -> ControllerParams:
        """The same parameters on ``device``."""
        return _moved(self, device)


@dataclass(frozen=True, eq=False)
class NormParams:
    """The RMSNorm weight: ``gamma[D]``, BF16, or FP32 where the contract's ``gamma_dtype`` says so."""

    gamma: torch.Tensor

    def validate(self, contract: LayerContract) -> None:
        """Raise unless gamma has the contract's shape and dtype."""
        dtypes = (GAMMA_DTYPES[contract.gamma_dtype],)
        check_tensor("norm.gamma", self.gamma, (contract.hidden,), dtypes, legend="[D]")

    def fingerprint(self) -> str:
        """SHA-256 over dtype, shape and bytes of gamma."""
        return _sha256_of("norm", _described(self))

    def to(self, device: torch.device | str) -> NormParams:
        """The same parameter on ``device``."""
        return _moved(self, device)


@dataclass(frozen=True, eq=False)
class ResidualBatch:
    """Everything one block boundary reads, for T tokens.

    ``r_old`` BF16 ``[T, 4, D]``, ``y_sublayer`` BF16 ``[T, D]``, ``token_id`` int64 ``[T]``. An empty
    ``weight_fingerprint`` means unsealed; otherwise it must be that of the contract and parameters.
    """

    r_old: torch.Tensor
    y_sublayer: torch.Tensor
    controller: ControllerParams
    norm: NormParams
    token_id: torch.Tensor
    contract: LayerContract
    row_geometry: str = "packed"
    weight_fingerprint: str = ""

    @property
    def tokens(self) -> int:
        """T, the number of rows."""
        return int(self.r_old.shape[0])

    @property
    def hidden(self) -> int:
        """D, the hidden width."""
        return int(self.r_old.shape[-1])

    def validate(self) -> None:
        """Raise unless contract, shapes, dtypes, devices, geometry and fingerprint all agree."""
        for name, kind in (("contract", LayerContract), ("controller", ControllerParams), ("norm", NormParams)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name}: got {type(getattr(self, name)).__name__}, want {kind.__name__}")
        self.contract.validate()
        _one_of("row_geometry", self.row_geometry, ROW_GEOMETRIES)
        if not isinstance(self.r_old, torch.Tensor):
            raise TypeError(f"r_old: got {type(self.r_old).__name__}, want a torch.Tensor")
        if self.r_old.dim() != 3:
            raise ValueError(f"r_old: got shape {tuple(self.r_old.shape)}, want [T, 4, D]")
        t, d, device = self.tokens, self.contract.hidden, self.r_old.device
        check_tensor("r_old", self.r_old, (t, HC_MULT, d), checks.BF16, legend="[T, 4, D]")
        check_tensor("y_sublayer", self.y_sublayer, (t, d), checks.BF16, device, "[T, D]")
        check_tensor("token_id", self.token_id, (t,), checks.INT64, device, "[T]")
        self.controller.validate(self.contract)
        self.norm.validate(self.contract)
        for name, tensor in (("controller.weight", self.controller.weight), ("norm.gamma", self.norm.gamma)):
            if tensor.device != device:
                raise ValueError(f"{name}: got device {tensor.device}, want {device} (that of r_old)")
        if self.row_geometry == "one-row" and t != 1:
            raise ValueError(f"row_geometry: got 'one-row' with T={t}, want T=1")
        if self.weight_fingerprint and self.weight_fingerprint != self.compute_weight_fingerprint():
            raise ValueError(
                f"weight_fingerprint: got {self.weight_fingerprint!r}, "
                f"want {self.compute_weight_fingerprint()!r} (that of the contract and parameters)"
            )

    def compute_weight_fingerprint(self) -> str:
        """SHA-256 over the fingerprints of contract, controller and norm."""
        parts = (self.contract.fingerprint(), self.controller.fingerprint(), self.norm.fingerprint())
        return _sha256_of("weights", parts)

    def sealed(self) -> ResidualBatch:
        """A copy with ``weight_fingerprint`` filled in."""
        return dataclasses.replace(self, weight_fingerprint=self.compute_weight_fingerprint())

    def to(self, device: torch.device | str) -> ResidualBatch:
        """The same batch on ``device``."""
        return dataclasses.replace(
            self,
            r_old=self.r_old.to(device),
            y_sublayer=self.y_sublayer.to(device),
            token_id=self.token_id.to(device),
            controller=self.controller.to(device),
            norm=self.norm.to(device),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Validate, then write tensors and contract to a safetensors file, replacing it atomically."""
        self.validate()
        tensors = {"r_old": self.r_old, "y_sublayer": self.y_sublayer, "token_id": self.token_id}
        tensors |= {f"controller.{spec.name}": getattr(self.controller, spec.name) for spec in fields(ControllerParams)}
        tensors["norm.gamma"] = self.norm.gamma
        labels = {
            "contract": json.dumps(self.contract.to_dict()),
            "row_geometry": self.row_geometry,
            "weight_fingerprint": self.weight_fingerprint,
        }
        write_tensor_file(path, _BATCH_KIND, tensors, labels)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ResidualBatch:
        """The batch of ``save``, on the CPU, validated; ``ValueError`` for a changed, incomplete or foreign file."""
        names = [f"controller.{spec.name}" for spec in fields(ControllerParams)]
        tensors, labels = read_tensor_file(path, _BATCH_KIND, ["r_old", "y_sublayer", "token_id", "norm.gamma", *names])
        batch = cls(
            r_old=tensors["r_old"],
            y_sublayer=tensors["y_sublayer"],
            token_id=tensors["token_id"],
            controller=ControllerParams(*(tensors[name] for name in names)),
            norm=NormParams(tensors["norm.gamma"]),
            contract=LayerContract.from_dict(_json(labels, "contract")),
            row_geometry=_label(labels, "row_geometry"),
            weight_fingerprint=_label(labels, "weight_fingerprint"),
        )
        batch.validate()
        return batch


@dataclass(frozen=True, eq=False)
class GradBoundary:
    """The gradients that arrive: BF16 ``d_r_new[T, 4, D]``, ``d_normalized[T, D]``, ``d_residual[T, D]``.

    ``metadata`` is the caller's own, and must be JSON to be saved.
    """

    d_r_new: torch.Tensor
    d_normalized: torch.Tensor
    d_residual: torch.Tensor
    metadata: dict[str, Any] = field(default_factory=dict)

    def validate(self, batch: ResidualBatch) -> None:
        """Raise unless the three tensors have the shapes, BF16 and the device that ``batch`` implies."""
        t, d, device = batch.tokens, batch.contract.hidden, batch.r_old.device
        check_tensor("d_r_new", self.d_r_new, (t, HC_MULT, d), checks.BF16, device, "[T, 4, D]")
        check_tensor("d_normalized", self.d_normalized, (t, d), checks.BF16, device, "[T, D]")
        check_tensor("d_residual", self.d_residual, (t, d), checks.BF16, device, "[T, D]")

    def to(self, device: torch.device | str) -> GradBoundary:
        """The same gradients on ``device``."""
        return _moved(self, device)

    def save(self, path: str | os.PathLike[str], contract: LayerContract | None = None) -> None:
        """Write the gradients to a safetensors file, replacing it atomically.

        ``contract`` is the one of the batch that they belong to; with it stored, ``load`` can refuse another.
        """
        tensors = {name: getattr(self, name) for name in _GRAD_TENSORS}
        if json.loads(json.dumps(self.metadata)) != self.metadata:
            raise ValueError(f"metadata: got {self.metadata!r}, want what JSON keeps as it is (string keys, lists)")
        labels = {
            "schema_version": SCHEMA_VERSION,
            "contract": json.dumps(contract.to_dict() if contract is not None else None),
            "metadata": json.dumps(self.metadata),
        }
        write_tensor_file(path, _GRADS_KIND, tensors, labels)

    @classmethod
    def load(cls, path: str | os.PathLike[str], contract: LayerContract | None = None) -> GradBoundary:
        """The gradients of ``save``, on the CPU.

        ``ValueError`` for a changed, incomplete or foreign file, and where both the file and the caller name a contract
        and their fingerprints differ.
        """
        tensors, labels = read_tensor_file(path, _GRADS_KIND, _GRAD_TENSORS)
        if _label(labels, "schema_version") != SCHEMA_VERSION:
            raise ValueError(f"schema_version: got {labels['schema_version']!r}, want {SCHEMA_VERSION!r}")
        stored = _json(labels, "contract")
        if stored is not None and contract is not None:
            recorded = LayerContract.from_dict(stored).fingerprint()
            if recorded != contract.fingerprint():
                raise ValueError(f"contract: got fingerprint {recorded}, want {contract.fingerprint()}")
        return cls(**tensors, metadata=_json(labels, "metadata"))


_GRAD_TENSORS = ("d_r_new", "d_normalized", "d_residual")


def _label(labels: Mapping[str, str], key: str) -> str:
    if key not in labels:
        raise ValueError(f"metadata: missing {key!r}")
    return labels[key]


def _json(labels: Mapping[str, str], key: str) -> Any:
    try:
        return json.loads(_label(labels, key))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"metadata: {key!r} is not JSON ({type(error).__name__})") from None


def _tensors(owner: Any) -> dict[str, torch.Tensor]:
    values = {spec.name: getattr(owner, spec.name) for spec in fields(owner)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _described(owner: Any) -> list[list[object]]:
    return [[name, str(t.dtype), list(t.shape), tensor_sha256(t)] for name, t in sorted(_tensors(owner).items())]


def _moved(owner: T, device: torch.device | str) -> T:
    moved: dict[str, Any] = {name: t.to(device) for name, t in _tensors(owner).items()}
    return dataclasses.replace(owner, **moved)


__all__ = [
    "CANONICAL_FUSION_MODE",
    "COMB_SLICE",
    "CONTROLLER_RMS",
    "FUSION_MODES",
    "GAMMA_DTYPES",
    "HC_MULT",
    "MHC_EPS",
    "ORACLE_PROFILE",
    "P1_RMS",
    "PLACEMENTS",
    "PORTABLE_PROFILE",
    "POST_SLICE",
    "PRE_SLICE",
    "PROD_CONTROLLER_N",
    "PROD_HIDDEN",
    "RELEASED_RMS",
    "RMSNORM_EPS",
    "ROW_GEOMETRIES",
    "SCHEMA_VERSION",
    "SINKHORN_ITERS",
    "TRAINABILITY_MODES",
    "ControllerParams",
    "GradBoundary",
    "LayerContract",
    "NormParams",
    "ResidualBatch",
    "tensor_bytes",
    "tensor_sha256",
]
