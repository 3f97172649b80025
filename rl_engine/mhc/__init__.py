"""mHC and RMSNorm of DeepSeek-V4 at the byte: contract, oracle, golden fixtures, providers and their judge.

The names below are the public ones that most users need; everything else is imported from its module, for example
``rl_engine.mhc.fixtures`` or ``rl_engine.mhc.acceptance``. Importing has no side effect and needs no compiler,
Triton or GPU.
"""

from __future__ import annotations

from rl_engine.mhc.block import mhc_block_backward, mhc_block_forward
from rl_engine.mhc.contract import (
    ORACLE_PROFILE,
    PORTABLE_PROFILE,
    ControllerParams,
    GradBoundary,
    LayerContract,
    NormParams,
    ResidualBatch,
)
from rl_engine.mhc.profiles import NumericProfile, Tolerance, register_profile
from rl_engine.mhc.provider import (
    MHCProvider,
    ReferenceProvider,
    StubProvider,
    check_capability,
    resolve_provider,
)
from rl_engine.mhc.trace import MHCTrace, first_divergence

__all__ = [
    "ORACLE_PROFILE",
    "PORTABLE_PROFILE",
    "ControllerParams",
    "GradBoundary",
    "LayerContract",
    "MHCProvider",
    "MHCTrace",
    "NormParams",
    "NumericProfile",
    "ReferenceProvider",
    "ResidualBatch",
    "StubProvider",
    "Tolerance",
    "check_capability",
    "first_divergence",
    "mhc_block_backward",
    "mhc_block_forward",
    "register_profile",
    "resolve_provider",
]
