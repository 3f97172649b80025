"""The controller's parameters, FP32 whatever a whole-module cast asks for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_engine.mhc.contract import HC_MULT, PROD_CONTROLLER_N, ControllerParams
from rl_engine.mhc.nn.storage import KeepsDtype


class MHCController(KeepsDtype):
    """``weight[24, 4D]``, ``alpha_pre[1]``, ``alpha_post[1]``, ``alpha_res[1]``, ``bias[24]``, all FP32 parameters.

    They stay FP32 whatever dtype the module, or one around it, is cast to, and a state dict must hold them as FP32
    (``storage.KeepsDtype``). It has no forward: ``HyperConnection`` hands the parameters to the kernels.
    """

    weight: nn.Parameter
    alpha_pre: nn.Parameter
    alpha_post: nn.Parameter
    alpha_res: nn.Parameter
    bias: nn.Parameter

    def __init__(self, hidden: int, device: torch.device | str | None = None) -> None:
        """Parameters for streams of width ``hidden``: a normal weight of scale ``(4 hidden)^-0.5``, alphas 1, bias 0.

        ``ValueError`` unless ``hidden`` is a positive integer.
        """
        super().__init__()
        if type(hidden) is not int or hidden < 1:
            raise ValueError(f"hidden: got {hidden!r}, want a positive integer")
        self.hidden = hidden
        shapes = {"weight": (PROD_CONTROLLER_N, HC_MULT * hidden), "bias": (PROD_CONTROLLER_N,)}
        for name in ("weight", "alpha_pre", "alpha_post", "alpha_res", "bias"):
            empty = torch.empty(shapes.get(name, (1,)), dtype=torch.float32, device=device)
            self.register_parameter(name, nn.Parameter(empty))
        self.reset_parameters()

    @classmethod
    def from_params(cls, params: ControllerParams) -> MHCController:
        """A module that holds copies of these parameters, such as ``integrations.deepseek_v4`` reads them.

        ``TypeError`` or ``ValueError`` where a tensor has another dtype or shape than the contract's.
        """
        weight = params.weight
        if weight.dim() != 2 or weight.shape[1] % HC_MULT or not weight.shape[1]:
            raise ValueError(f"controller.weight: got shape {tuple(weight.shape)}, want [24, 4 * hidden]")
        module = cls(weight.shape[1] // HC_MULT, device=weight.device)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                value = getattr(params, name)
                if value.dtype != torch.float32:
                    raise TypeError(f"controller.{name}: got dtype {value.dtype}, want torch.float32")
                if value.shape != parameter.shape:
                    wanted = tuple(parameter.shape)
                    raise ValueError(f"controller.{name}: got shape {tuple(value.shape)}, want {wanted}")
                parameter.copy_(value)
        return module

    def to_params(self) -> ControllerParams:
        """The parameters as the contract's type: the same memory, without autograd."""
        return ControllerParams(*(parameter.detach() for parameter in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """``(weight, alpha_pre, alpha_post, alpha_res, bias)``, the order of ``ops.mhc_pre_rmsnorm``."""
        return self.weight, self.alpha_pre, self.alpha_post, self.alpha_res, self.bias

    def reset_parameters(self) -> None:
        """Draw the weight again and set the rest to their initial values."""
        with torch.no_grad():
            self.weight.normal_(std=(HC_MULT * self.hidden) ** -0.5)
            self.bias.zero_()
            for alpha in (self.alpha_pre, self.alpha_post, self.alpha_res):
                alpha.fill_(1.0)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"hidden={self.hidden}"
