"""What all operations have in common: how one is registered, how its results are stored, when one runs directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._library.custom_ops import CustomOpDef
from torch.library import custom_op

NAMESPACE = "rl_mhc"
BF16, FP32 = torch.bfloat16, torch.float32


def define(
    name: str,
    forward: Callable[..., Any],
    forward_fake: Callable[..., Any],
    backward: Callable[..., Any],
    backward_fake: Callable[..., Any],
) -> tuple[CustomOpDef, CustomOpDef]:
    """Register ``rl_mhc::name`` and ``rl_mhc::name_bwd`` for every device and return both.

    The functions' annotations are the schemas; the fakes give shapes, dtypes and strides. The backward is no function
    to be differentiated again: a second derivative is a ``RuntimeError``. How the first calls the second is said with
    ``differentiate``.
    """
    ops = []
    for qualified, function, fake in (
        (f"{NAMESPACE}::{name}", forward, forward_fake),
        (f"{NAMESPACE}::{name}_bwd", backward, backward_fake),
    ):
        op = custom_op(qualified, mutates_args=())(function)
        op.register_fake(fake)
        ops.append(op)

    def refuse(ctx: Any, *grads: object) -> NoReturn:
        raise RuntimeError(f"{NAMESPACE}::{name}: second derivatives are not defined")

    ops[1].register_autograd(refuse)
    return ops[0], ops[1]


def differentiate(
    op: CustomOpDef,
    backward: Callable[..., Any],
    keep: Callable[[Any, tuple[Any, ...], Any], None],
) -> None:
    """``backward(ctx, *grads)`` is the gradient of ``op``, of what ``keep(ctx, inputs, output)`` keeps.

    A gradient that does not arrive is ``None``, not a tensor of zeros that somebody has to write.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        keep(ctx, inputs, output)

    op.register_autograd(backward, setup_context=setup_context)


def stored(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``t`` in row-major memory, rounded once to ``dtype``: what the fakes promise, whatever a provider returns."""
    if t.dtype is dtype and t.is_contiguous():
        return t
    return t.to(dtype).contiguous()


def arrived(grad: torch.Tensor | None, like: torch.Tensor, *shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    """The gradient, or zeros of that shape and dtype on the device of ``like``, one row of them, where none arrived."""
    return torch.zeros(shape[1:], dtype=dtype, device=like.device).expand(shape) if grad is None else grad


def needed(ctx: Any, grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """The gradients that somebody asked for, in the order of the inputs, ``None`` for all other inputs."""
    wanted = ctx.needs_input_grad
    padded = (*grads, *[None] * (len(wanted) - len(grads)))
    return tuple(grad if needs else None for grad, needs in zip(padded, wanted, strict=True))


def unobserved(*tensors: torch.Tensor) -> bool:
    """Whether nobody would see a call pass through the dispatcher, so that its implementation may be called at once.

    That is: no gradient is recorded, nothing traces, profiles or intercepts, and the tensors are plain ones.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._is_torch_function_mode_enabled():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._autograd._profiler_enabled():
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    for t in tensors:  # a loop, as this runs before every small call of a decoder
        kind = type(t)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            return False
    return not tensors[0].is_meta
