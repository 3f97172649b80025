"""State dicts of DeepSeek-V4 to controllers and back: FP32 tensors change their names and nothing else.

``fn`` is ``weight``, ``base`` is ``bias``, and ``scale[0:3]`` are ``alpha_pre``, ``alpha_post`` and ``alpha_res``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rl_engine.mhc.checks import FP32, check_tensor
from rl_engine.mhc.contract import PROD_CONTROLLER_N, ControllerParams
from rl_engine.mhc.integrations.deepseek_v4.names import (
    ALPHAS,
    SUBLAYERS,
    Layout,
    Site,
    controller_names,
    head_names,
    take_inventory,
)
from rl_engine.mhc.reduction import HC_MULT

_CONTROLLER_SHAPES = {"bias": (PROD_CONTROLLER_N,), "alphas": (len(ALPHAS),), **{alpha: (1,) for alpha in ALPHAS}}
_HEAD_SHAPES = {"base": (HC_MULT,), "scale": (1,)}


@dataclass(frozen=True, eq=False)
class HeadParams:
    """The parameters that merge the streams at the model's end: ``fn[4, 4D]``, ``base[4]``, ``scale[1]``, all FP32."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor

    @property
    def hidden(self) -> int:
        """D, the hidden width."""
        return int(self.fn.shape[-1]) // HC_MULT

    def validate(self) -> None:
        """Raise unless each tensor has its shape (``ValueError``), FP32 (``TypeError``) and the device of ``fn``."""
        _Widths().check_head(_parts_of_head(self), {part: f"head.{part}" for part in ("fn", "base", "scale")})


@dataclass(frozen=True, eq=False)
class ModelParams:
    """All mHC parameters of a model: a controller for each ``Site``, and the head, None where there is none."""

    controllers: Mapping[Site, ControllerParams]
    head: HeadParams | None


def model_from_state_dict(
    tensors: Mapping[str, torch.Tensor], layout: Layout, prefix: str | None = None
) -> ModelParams:
    """The controllers, in order of their sites, and the head of a state dict; names that are not mHC are ignored.

    No tensor is copied, but alphas that come as one FP32 ``[3]`` become three of their own, ``[1]`` each. Each wanted
    tensor is taken once, and no other. ``prefix`` replaces the layout's standard one.

    Raises ``ValueError`` for an unknown layout, a name that is missing, unknown or of another layout, a gap between
    layers, a wrong shape, another D than that of the first weight, and parts on several devices; ``TypeError`` for a
    value that is no FP32 tensor.
    """
    inventory = take_inventory(tensors, layout, prefix)
    widths, controllers = _Widths(), dict[Site, ControllerParams]()
    for site in inventory.sites:
        names = controller_names(site, layout, prefix)
        parts = {part: tensors[name] for part, name in names.items()}
        widths.check_controller(parts, names)
        controllers[site] = _joined(parts)
    if not inventory.has_head:
        return ModelParams(controllers, None)
    names = head_names(layout, prefix)
    parts = {part: tensors[name] for part, name in names.items()}
    widths.check_head(parts, names)
    return ModelParams(controllers, HeadParams(**parts))


def controllers_from_state_dict(
    tensors: Mapping[str, torch.Tensor], layout: Layout, prefix: str | None = None
) -> dict[Site, ControllerParams]:
    """The controllers of ``model_from_state_dict``; ``ValueError`` where there is none."""
    controllers = dict(model_from_state_dict(tensors, layout, prefix).controllers)
    if not controllers:
        wanted = ", ".join(controller_names(Site(0, "attn"), layout, prefix).values())
        raise ValueError(f"controllers: no layer in the state dict, want {wanted} and so on (layout {layout!r})")
    return controllers


def head_from_state_dict(tensors: Mapping[str, torch.Tensor], layout: Layout, prefix: str | None = None) -> HeadParams:
    """The head of ``model_from_state_dict``; ``ValueError`` where there is none."""
    head = model_from_state_dict(tensors, layout, prefix).head
    if head is None:
        wanted = ", ".join(head_names(layout, prefix).values())
        raise ValueError(f"head: missing in the state dict, want {wanted} (layout {layout!r})")
    return head


def state_dict_of(
    controllers: Mapping[Site, ControllerParams], head: HeadParams | None, layout: Layout, prefix: str | None = None
) -> dict[str, torch.Tensor]:
    """The state dict of ``controllers`` and ``head`` (None to leave it out), layer by layer, FP32, detached.

    No tensor is copied, but three alphas that become one. Raises ``TypeError`` for a key that is no ``Site``, a value
    that is no ``ControllerParams`` and a wrong dtype; ``ValueError`` for an unknown layout, a site that is missing
    below the last layer, a wrong shape, an inconsistent D and parts on several devices.
    """
    names = head_names(layout, prefix)
    widths, tensors = _Widths(), dict[str, torch.Tensor]()
    for site in _complete(controllers):
        controller = controllers[site]
        if not isinstance(controller, ControllerParams):
            raise TypeError(f"controllers[{site}]: got {type(controller).__name__}, want ControllerParams")
        parts = {part: getattr(controller, part) for part in ("weight", *ALPHAS, "bias")}
        widths.check_controller(parts, {part: f"controllers[{site}].{part}" for part in parts})
        for part, name in controller_names(site, layout, prefix).items():
            tensors[name] = torch.cat([a.detach() for a in controller.alphas]) if part == "alphas" else parts[part]
    if head is not None:
        if not isinstance(head, HeadParams):
            raise TypeError(f"head: got {type(head).__name__}, want HeadParams or None")
        parts = _parts_of_head(head)
        widths.check_head(parts, {part: f"head.{part}" for part in parts})
        tensors |= {name: parts[part] for part, name in names.items()}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def convert_state_dict(
    tensors: Mapping[str, torch.Tensor],
    source: Layout,
    target: Layout,
    source_prefix: str | None = None,
    target_prefix: str | None = None,
) -> dict[str, torch.Tensor]:
    """The mHC tensors of a state dict under the names of ``target``, and no others; the head if it is there.

    The composition of ``model_from_state_dict`` and ``state_dict_of``, with their errors.
    """
    model = model_from_state_dict(tensors, source, source_prefix)
    return state_dict_of(model.controllers, model.head, target, target_prefix)


def _parts_of_head(head: HeadParams) -> dict[str, torch.Tensor]:
    return {"fn": head.fn, "base": head.base, "scale": head.scale}


def _joined(parts: Mapping[str, torch.Tensor]) -> ControllerParams:
    alphas = {alpha: parts[alpha] for alpha in ALPHAS if alpha in parts}
    if "alphas" in parts:
        scale = parts["alphas"].detach()
        alphas = {alpha: scale[i : i + 1].clone() for i, alpha in enumerate(ALPHAS)}
    return ControllerParams(weight=parts["weight"], bias=parts["bias"], **alphas)


def _complete(controllers: Mapping[Site, ControllerParams]) -> list[Site]:
    """The sites in order; raise unless they are both sublayers of the layers 0 to N-1."""
    for site in controllers:
        if not isinstance(site, Site):
            raise TypeError(f"controllers: got a key of type {type(site).__name__}, want Site")
    count = max((site.layer + 1 for site in controllers), default=0)
    for layer in range(count):
        for sublayer in SUBLAYERS:
            if Site(layer, sublayer) not in controllers:
                raise ValueError(
                    f"controllers[{Site(layer, sublayer)}]: missing, want both sublayers of layers 0 to {count - 1}"
                )
    return sorted(controllers)


class _Widths:
    """Checks the tensors of one model, whose projections must all have the width 4·D of the first."""

    def __init__(self) -> None:
        self.first: tuple[str, int] | None = None

    def check_controller(self, parts: Mapping[str, object], names: Mapping[str, str]) -> None:
        self._check(parts, names, "weight", PROD_CONTROLLER_N, _CONTROLLER_SHAPES)

    def check_head(self, parts: Mapping[str, object], names: Mapping[str, str]) -> None:
        self._check(parts, names, "fn", HC_MULT, _HEAD_SHAPES)

    def _check(
        self,
        parts: Mapping[str, object],
        names: Mapping[str, str],
        projection: str,
        rows: int,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        weight = _fp32(names[projection], parts[projection])
        self._check_projection(names[projection], weight, rows)
        for part, value in parts.items():
            if part != projection:
                check_tensor(names[part], _fp32(names[part], value), shapes[part], FP32, weight.device)

    def _check_projection(self, name: str, weight: torch.Tensor, rows: int) -> None:
        shape = tuple(weight.shape)
        if len(shape) != 2 or shape[0] != rows or shape[1] % HC_MULT or not shape[1]:
            raise ValueError(f"{name}: got shape {shape}, want [{rows}, 4D]")
        if self.first is None:
            self.first = name, shape[1]
        elif shape[1] != self.first[1]:
            raise ValueError(
                f"{name}: got D={shape[1] // HC_MULT}, want D={self.first[1] // HC_MULT} (that of {self.first[0]})"
            )


def _fp32(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, want a torch.Tensor")
    if value.dtype != torch.float32:
        raise TypeError(
            f"{name}: got dtype {value.dtype}, want torch.float32; mHC parameters are kept in FP32, "
            "convert explicitly with .to(torch.float32) if that is meant"
        )
    return value
