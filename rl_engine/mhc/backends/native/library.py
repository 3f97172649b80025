"""The compiled library: where it is, what its functions take, and which instruction-set level runs.

``csrc/mhc/include/mhc/abi.h`` is what this file restates for ctypes. The library links to neither torch nor Python.
"""

from __future__ import annotations

import ctypes
import functools
import os
from importlib import metadata
from pathlib import Path

ABI_VERSION = 3
ISA_LEVELS = ("baseline", "avx2", "avx512", "neon")
"""In the order of ``enum mhc_isa``."""

ISA_VARIABLE = "RL_MHC_ISA"
FILE_NAME = "librl_mhc_native.so"
DISTRIBUTION = "rl-engine-mhc"


class NativeBackendUnavailable(RuntimeError):
    """The compiled library is not there, or is not the one that this package was written for."""


class Call(ctypes.Structure):
    """``struct mhc_call``: how to run."""

    _fields_ = [(name, ctypes.c_int32) for name in ("version", "isa", "threads", "reserved")]


class Rows(ctypes.Structure):
    """``struct mhc_rows``: a matrix whose rows are contiguous."""

    _fields_ = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64), ("dtype", ctypes.c_int64)]


_P, _I, _R = ctypes.c_void_p, ctypes.c_int64, Rows
_SIGNATURES: dict[str, list[type]] = {
    "mhc_elementary": [ctypes.c_int32, _I, _P, _P],
    "mhc_split_shift": [_I, _P, _P],
    "mhc_split_fwd": [_I, _P, _P, _P, _P, _P, _P],
    "mhc_split_bwd": [_I, _P, _P, _P, _R, _R, _P, _P],
    "mhc_fold_k": [_I, _I, _I, _R, _R, _P, _P],
    "mhc_fold_n": [_I, _I, _I, _R, _R, _P],
    "mhc_fold_m": [_I, _I, _I, _R, _R, _P],
    "mhc_gemm_rms_mean": [_I, _I, ctypes.c_double, _P, _P],
    "mhc_gemm_rms_scale": [_I, _I, ctypes.c_double, _P, _P, _P],
    "mhc_gemm_rms_bwd": [_I, _I, _P, _P, _R, _R, _P, _P, _P, _P],
    "mhc_post_fwd": [_I, _I, _R, _R, _P, _P, _P],
    "mhc_post_bwd": [_I, _I, _R, _R, _R, _P, _P, _P, _P, _I, _P, _P],
    "mhc_aggregate_fwd": [_I, _I, _P, _R, _P],
    "mhc_aggregate_bwd": [_I, _I, _R, _P, _R, _P, _P],
    "mhc_rmsnorm_mean": [_I, _I, _R, ctypes.c_double, _P],
    "mhc_rmsnorm_fwd": [_I, _I, _R, _R, _P, _P, _P],
    "mhc_rmsnorm_bwd": [_I, _I, _R, _R, _R, _R, _P, _P, _P],
    "mhc_block_forward": [ctypes.c_char_p],
    "mhc_block_backward": [ctypes.c_char_p],
    "mhc_probe_copy": [_I, _P, _P],
}
"""The functions that take a ``struct mhc_call`` first and return a status, with what follows it."""


@functools.cache
def load() -> ctypes.CDLL:
    """The library, its functions declared; ``NativeBackendUnavailable`` where it is absent or of another version."""
    path = _path()
    if path is None:
        raise NativeBackendUnavailable(
            f"native: {FILE_NAME} is not installed: build the package with a C++20 compiler (pip install .), "
            "without -C cmake.define.RL_MHC_NATIVE=OFF"
        )
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.mhc_abi_version())
        if version == ABI_VERSION:
            _declare(library)
    except (OSError, AttributeError) as error:  # no library at all, or one that lacks a function
        raise NativeBackendUnavailable(f"native: {path} cannot be loaded: {error}") from error
    if version != ABI_VERSION:
        raise NativeBackendUnavailable(
            f"native: {path} has interface version {version}, want {ABI_VERSION}: rebuild it"
        )
    return library


def _declare(library: ctypes.CDLL) -> None:
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.POINTER(Call), *arguments], ctypes.c_int32
    library.mhc_isa_available.argtypes, library.mhc_isa_available.restype = [ctypes.c_int32], ctypes.c_int32
    library.mhc_float_mode_default.argtypes, library.mhc_float_mode_default.restype = [], ctypes.c_uint64
    library.mhc_float_mode_restore.argtypes, library.mhc_float_mode_restore.restype = [ctypes.c_uint64], None
    library.mhc_probe_add_chain.argtypes, library.mhc_probe_add_chain.restype = [_I], ctypes.c_float
    library.mhc_probe_multiply_add.argtypes = [ctypes.POINTER(Call), _I]
    library.mhc_probe_multiply_add.restype = _I


def available_levels(library: ctypes.CDLL) -> tuple[str, ...]:
    """The levels that the build has and this processor runs, the narrowest first."""
    return tuple(name for index, name in enumerate(ISA_LEVELS) if library.mhc_isa_available(index))


@functools.cache
def isa_level(library: ctypes.CDLL) -> str:
    """The widest level, or the one that ``RL_MHC_ISA`` names when this is first called.

    ``ValueError`` for a name that is not available. The level moves no byte; forcing one is for tests.
    """
    levels = available_levels(library)
    forced = os.environ.get(ISA_VARIABLE)
    if not forced:
        return levels[-1]
    if forced not in levels:
        raise ValueError(f"{ISA_VARIABLE}: got {forced!r}, want one of: {', '.join(levels)}")
    return forced


def _path() -> Path | None:
    beside = Path(__file__).with_name(FILE_NAME)
    if beside.is_file():
        return beside
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name == FILE_NAME]
    return next((path for path in found if path.is_file()), None)
