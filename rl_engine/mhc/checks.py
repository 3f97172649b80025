"""The one check of a tensor argument: what came, what is wanted, and which field it was."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FP32 = (torch.float32,)
BF16 = (torch.bfloat16,)
FP32_OR_BF16 = (torch.float32, torch.bfloat16)
INT64 = (torch.int64,)


def check_tensor(
    field: str,
    value: object,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
    legend: str = "",
) -> None:
    """Raise unless ``value`` is a tensor of that shape, one of those dtypes and, where given, that device.

    ``TypeError`` for a non-tensor or a wrong dtype, ``ValueError`` for a wrong shape or device. ``legend`` says
    what the wanted shape means, for example ``[T, 4, D]``.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{field}: got {type(value).__name__}, want a torch.Tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{field}: got dtype {value.dtype}, want {' or '.join(map(str, dtypes))}")
    if tuple(value.shape) != tuple(shape):
        meaning = f" = {legend}" if legend else ""
        raise ValueError(f"{field}: got shape {tuple(value.shape)}, want {tuple(shape)}{meaning}")
    if device is not None and value.device != device:
        raise ValueError(f"{field}: got device {value.device}, want {device}")
