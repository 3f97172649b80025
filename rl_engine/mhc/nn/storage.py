"""A module whose parameters keep their dtype, which is a part of the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class KeepsDtype(nn.Module):
    """``.to(dtype)``, ``.bfloat16()``, ``.half()`` and ``.double()`` leave its own parameters as they are.

    That holds within a larger module too. A move to another device moves them. A state dict must hold their dtype:
    loading another one is a ``RuntimeError``, as another shape is; ``copy_`` would convert it without a word.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What ``.to()`` and its kin call with a function of a tensor."""

        def keeping(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        return super()._apply(keeping, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        errors = rest[-1]
        for name, parameter in self.named_parameters(recurse=False):
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.dtype != parameter.dtype:
                errors.append(f"{prefix}{name}: got dtype {value.dtype}, want {parameter.dtype}")
        super()._load_from_state_dict(state_dict, prefix, *rest)
