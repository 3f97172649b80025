"""Providers for the tests of numeric profiles, and the profiles that they declare."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.mhc.contract import ORACLE_PROFILE, PORTABLE_PROFILE
from rl_engine.mhc.elementary import for_profile
from rl_engine.mhc.operators import ReferenceOperators
from rl_engine.mhc.operators.interface import check_arguments
from rl_engine.mhc.operators.reference import reference_operator
from rl_engine.mhc.profiles import NumericProfile, Tolerance
from rl_engine.mhc.provider import ReferenceProvider
from tests.planted import kernels
from tests.planted.arithmetic import Store, left4, nearest_even
from tests.planted.kernels import kernel

POST = ("post.r_new", "mhc_post_fwd.r_new")
HERE = "tests.acceptance.profile_providers"

NEAR = NumericProfile(
    "near-oracle-v1", "torch-library", tolerance={name: Tolerance(ulp=1) for name in POST}, base=ORACLE_PROFILE
)
"""One ULP at ``post.r_new``, equal bytes at every other boundary."""

ELSEWHERE = NumericProfile(
    "near-elsewhere-v1", "torch-library", tolerance={"pre.hidden": Tolerance(ulp=9)}, base=ORACLE_PROFILE
)

VAST = NumericProfile(
    "vast-v1", "torch-library", tolerance={"*": Tolerance(ulp=2**40, rtol=1e30, atol=1e300)}, base=ORACLE_PROFILE
)
"""Any finite number passes for any other."""

OWN = NumericProfile("left-fold-v1", "correctly-rounded", stream_tree="left", operators=f"{HERE}:LeftOperators")
"""Strict, and another tree in ``mhc_post``."""

NEAR_OWN = NumericProfile("near-left-fold-v1", "correctly-rounded", tolerance=NEAR.tolerance, base=OWN.id)


class LeftOperators(ReferenceOperators):
    """The oracle of ``OWN``; far enough from the contract's to be seen at once, as it adds 8 to every number."""

    @reference_operator
    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        check_arguments("mhc_post_fwd", r_old=r_old, y=y, c=c, post=post)
        return kernels.mhc_post_fwd(r_old, y, c, post, tree=left4, store=plus_eight)


def plus_eight(t: Tensor) -> Tensor:
    return nearest_even(t + torch.full((), 8.0))


def moved(steps: int) -> Store:
    """The contract's store, and every finite number moved that many steps away from zero."""

    def store(t: Tensor) -> Tensor:
        right = nearest_even(t)
        return torch.where(right.isfinite(), (right.view(torch.int16) + steps).view(torch.bfloat16), right)

    return store


class OneStep(ReferenceProvider):
    """``post.r_new`` is one ULP off."""

    mhc_post_fwd = kernel(kernels.mhc_post_fwd, store=moved(1))


class TwoSteps(ReferenceProvider):
    """``post.r_new`` is two ULPs off."""

    mhc_post_fwd = kernel(kernels.mhc_post_fwd, store=moved(2))


class InCompany(ReferenceProvider):
    """One ULP off where there is more than one row: within the tolerance, but a row depends on its company."""

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        return kernels.mhc_post_fwd(r_old, y, c, post, store=moved(int(len(r_old) > 1)))


class Spoiling(ReferenceProvider):
    """One element of ``post.r_new`` is ``junk``."""

    junk = float("nan")

    def mhc_post_fwd(self, r_old: Tensor, y: Tensor, c: Tensor, post: Tensor) -> Tensor:
        r_new = kernels.mhc_post_fwd(r_old, y, c, post)
        r_new[:, 2, 1] = self.junk
        return r_new


class Endless(Spoiling):
    """One element of ``post.r_new`` is infinite."""

    junk = float("inf")


class LeftKernel(ReferenceProvider):
    """A kernel for ``OWN``."""

    mhc_post_fwd = kernel(kernels.mhc_post_fwd, tree=left4, store=plus_eight)


class TreeKernel(ReferenceProvider):
    """A kernel for the contract's arithmetic, under whatever profile is asked for."""

    mhc_post_fwd = kernel(kernels.mhc_post_fwd)


class Misspelt(ReferenceProvider):
    """Declares a profile that nobody has registered."""

    mhc_post_fwd = kernel(kernels.mhc_post_fwd)

    def __init__(self) -> None:
        super().__init__()
        self.numeric_profile = "oracle-fp32-mhc-v9"


class OracleOnly(ReferenceProvider):
    """Declares the oracle profile, whatever is asked for."""

    mhc_post_fwd = kernel(kernels.mhc_post_fwd)

    def __init__(self) -> None:
        super().__init__(ORACLE_PROFILE)


class PortableAsOracle(ReferenceProvider):
    """Computes the portable profile's functions and declares the oracle's."""

    declared, computed = ORACLE_PROFILE, PORTABLE_PROFILE
    mhc_post_fwd = kernel(kernels.mhc_post_fwd)

    def __init__(self) -> None:
        super().__init__(self.declared)
        self.elementary = for_profile(self.computed)


class OracleAsPortable(PortableAsOracle):
    """Computes the oracle profile's functions and declares the portable's."""

    name = "OracleAsPortable"
    declared, computed = PORTABLE_PROFILE, ORACLE_PROFILE
