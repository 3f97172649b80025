"""What is known of a planted defect before the judge sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_engine.mhc.provider import ReferenceProvider
from tests.planted import kernels
from tests.planted.honest import Composites
from tests.planted.kernels import kernel

USUAL_CASE = "packed_t7_odd"


@dataclass(frozen=True)
class Defect:
    """A provider with one defect, and where the judge has to say so.

    ``boundary`` is the first divergence; ``group`` the group of checks that fails, with those ``beside`` it;
    ``case`` the one case that is run. ``also`` are further boundaries that diverge, ``says`` words of the report,
    ``hidden_in`` a case in which nobody could notice, so that the provider passes it.
    """

    name: str
    provider: type
    why: str
    boundary: str
    group: str
    case: str
    also: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    hidden_in: str = ""
    beside: tuple[str, ...] = ()


DEFECTS: dict[str, Defect] = {}
REFUSED = "refused"
"""The group of a provider that is refused before any operator runs: no check fails, as none is made."""


def planted(boundary: str, group: str = "boundaries", case: str = USUAL_CASE, **more: Any) -> Callable[[type], type]:
    """Register the class under its name; the first line of its docstring is why it is wrong."""

    def register(provider: type) -> type:
        name, why = provider.__name__, (provider.__doc__ or "").strip()
        assert name not in DEFECTS, name
        DEFECTS[name] = Defect(name, provider, why, boundary, group, case, **more)
        return provider

    return register


class Planted(ReferenceProvider):
    """The base of most: what a class does not override is the reference's, and right."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__name__


class OwnComposites(Composites, Planted):
    """Honest composites over the reference's leaf operators."""


class OwnPost(Planted):
    """One honest kernel, for classes whose defect lies elsewhere."""

    mhc_post_fwd = kernel(kernels.mhc_post_fwd)
