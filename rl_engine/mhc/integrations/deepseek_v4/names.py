"""What frameworks call the mHC parameters of DeepSeek-V4.

========================  ==================  ====================  ===================================================
part                      ``published``       ``huggingface``       ``megatron``
========================  ==================  ====================  ===================================================
prefix                    none                ``model.``            ``decoder.``
weight FP32 [24, 4D]      ``hc_attn_fn``      ``attn_hc.fn``        ``self_attention_hyper_connection.mapping_proj.weight``
bias FP32 [24]            ``hc_attn_base``    ``attn_hc.base``      ``self_attention_hyper_connection.bias``
alphas FP32 [3]           ``hc_attn_scale``   ``attn_hc.scale``     ``... .alpha_pre``, ``.alpha_post``, ``.alpha_res``: [1] each
head FP32 [4, 4D]         ``hc_head_fn``      ``hc_head.hc_fn``     ``hc_head_fn``
========================  ==================  ====================  ===================================================

The names of a controller stand behind the prefix and ``layers.{i}.``, with ``ffn`` for ``attn``, and
``mlp_hyper_connection`` in Megatron; those of the head stand behind the prefix, with ``base`` [4] and ``scale`` [1]
beside ``fn``. The rows are PRE[0:4], POST[4:8], COMB[8:24] in each of them. ``huggingface`` is a model in memory; what
``save_pretrained`` writes is ``huggingface-saved``: behind ``model.``, controllers named as in ``published``, and the
head as in ``huggingface``.

Sources: ``published`` and ``huggingface`` are the two sides of the ``deepseek_v4`` mapping in transformers 5.25.0
(``conversion_mapping.py``, ``models/deepseek_v4/modeling_deepseek_v4.py``), ``huggingface-saved`` is what that version
writes; ``megatron`` is that of Megatron Bridge
0.6.2 (``models/deepseek/deepseek_v4_bridge.py``). Multi-token prediction layers (a component ``mtp``) are not covered:
their names are ignored, as transformers ignores them.
"""  # noqa: E501 - a table row

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Layout = Literal["published", "huggingface", "huggingface-saved", "megatron"]
Sublayer = Literal["attn", "ffn"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
SUBLAYERS: tuple[Sublayer, ...] = get_args(Sublayer)
ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")  # scale[0], scale[1], scale[2]


@dataclass(frozen=True, order=True)
class Site:
    """One block boundary of the model: decoder layer ``layer``, from 0, and its ``attn`` or ``ffn``.

    Sites order as the data flows. ``ValueError`` for a negative layer or another sublayer.
    """

    layer: int
    sublayer: Sublayer

    def __post_init__(self) -> None:
        if type(self.layer) is not int or self.layer < 0:
            raise ValueError(f"site.layer: got {self.layer!r}, want an integer of at least 0")
        if self.sublayer not in SUBLAYERS:
            raise ValueError(f"site.sublayer: got {self.sublayer!r}, want one of: {', '.join(SUBLAYERS)}")

    def __str__(self) -> str:
        return f"layer {self.layer} {self.sublayer}"


@dataclass(frozen=True)
class Inventory:
    """What a set of names holds in full: every ``Site`` in order, layers 0 to N-1, and whether the head is there."""

    sites: tuple[Site, ...]
    has_head: bool


@dataclass(frozen=True)
class _Scheme:
    """Where a layout puts a controller in its layer, the head in its model, and what it calls their parts."""

    prefix: str
    places: Mapping[Sublayer, str]
    parts: Mapping[str, str]
    head: str

    def controller_leaves(self) -> dict[str, Sublayer]:
        return {place + leaf: sublayer for sublayer, place in self.places.items() for leaf in self.parts.values()}

    def head_leaves(self) -> dict[str, str]:
        return {self.head + part: part for part in _HEAD_PARTS}


_HEAD_PARTS = ("fn", "base", "scale")
_FUSED = {"weight": "fn", "bias": "base", "alphas": "scale"}
_SCHEMES: Mapping[str, _Scheme] = {
    "published": _Scheme("", {"attn": "hc_attn_", "ffn": "hc_ffn_"}, _FUSED, "hc_head_"),
    "huggingface": _Scheme("model.", {"attn": "attn_hc.", "ffn": "ffn_hc."}, _FUSED, "hc_head.hc_"),
    "huggingface-saved": _Scheme("model.", {"attn": "hc_attn_", "ffn": "hc_ffn_"}, _FUSED, "hc_head.hc_"),
    "megatron": _Scheme(
        "decoder.",
        {"attn": "self_attention_hyper_connection.", "ffn": "mlp_hyper_connection."},
        {"weight": "mapping_proj.weight", **{alpha: alpha for alpha in ALPHAS}, "bias": "bias"},
        "hc_head_",
    ),
}
_LAYER = re.compile(r"(?P<prefix>(?:[^.]+\.)*?)layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<leaf>.+)")
# A component that only an mHC parameter has, in any of the layouts.
_SUSPECT = re.compile(r"hc_.*|.*_hc|.*hyper_connection.*|mapping_proj|alpha_(pre|post|res)")


def _scheme(layout: str) -> _Scheme:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, want one of: {', '.join(LAYOUTS)}")
    return _SCHEMES[layout]


def default_prefix(layout: Layout) -> str:
    """What stands before ``layers.{i}.`` in a whole model: ``""``, ``"model."`` or ``"decoder."``.

    ``ValueError`` for an unknown layout.
    """
    return _scheme(layout).prefix


def _prefix(layout: Layout, prefix: str | None) -> str:
    standard = default_prefix(layout)
    if prefix is None:
        return standard
    if not isinstance(prefix, str) or (
        prefix and (not prefix.endswith(".") or prefix.startswith(".") or ".." in prefix)
    ):
        raise ValueError(f"prefix: got {prefix!r}, want '' or components that end in '.', such as 'module.decoder.'")
    return prefix


def controller_names(site: Site, layout: Layout, prefix: str | None = None) -> dict[str, str]:
    """The tensors of the controller at ``site``: part to name.

    The parts are ``weight``, ``bias`` and ``alphas`` where the three scalars are one tensor, else ``weight``,
    ``alpha_pre``, ``alpha_post``, ``alpha_res`` and ``bias``. ``prefix`` replaces the standard one. ``ValueError`` for
    an unknown layout or a prefix that does not end in a dot.
    """
    scheme, start = _scheme(layout), f"{_prefix(layout, prefix)}layers.{site.layer}."
    return {part: start + scheme.places[site.sublayer] + leaf for part, leaf in scheme.parts.items()}


def head_names(layout: Layout, prefix: str | None = None) -> dict[str, str]:
    """The tensors of the head: ``fn``, ``base`` and ``scale`` to name. Errors as in ``controller_names``."""
    start = _prefix(layout, prefix)
    return {part: start + leaf for leaf, part in _scheme(layout).head_leaves().items()}


def is_mhc_name(name: str) -> bool:
    """Whether ``name`` is, or looks like, an mHC parameter of a decoder layer or of the head, in any layout.

    ``TypeError`` for a name that is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"tensor name: got {type(name).__name__}, want str")
    components = name.split(".")
    return "mtp" not in components and any(_SUSPECT.fullmatch(component) for component in components)


def take_inventory(names: Iterable[str], layout: Layout, prefix: str | None = None) -> Inventory:
    """Which sites, and whether the head, the ``names`` of a state dict hold. Names that are not mHC are ignored.

    ``ValueError`` for an unknown layout, a name of another layout or prefix, a name that looks like an mHC parameter
    and is none, a part that is missing, and a layer that is missing before the last one. Layers missing at the end
    cannot be seen; no layer and no head at all is an empty inventory.
    """
    start, found, held = _prefix(layout, prefix), set[Site](), dict[str, None]()
    for name in filter(is_mhc_name, names):
        site = _place(name, layout, start)
        if site is not None:
            found.add(site)
        held[name] = None
    head = head_names(layout, start)
    _require(head, held, layout, optional=True)
    count = max((site.layer + 1 for site in found), default=0)
    sites = []
    for layer in range(count):
        if not found & {Site(layer, sublayer) for sublayer in SUBLAYERS}:
            raise ValueError(f"{start}layers.{layer}: missing, want layers 0 to {count - 1} without a gap")
        for sublayer in SUBLAYERS:
            site = Site(layer, sublayer)
            _require(controller_names(site, layout, start), held, layout)
            sites.append(site)
    return Inventory(tuple(sites), any(name in held for name in head.values()))


def _require(wanted: Mapping[str, str], held: Iterable[str], layout: str, optional: bool = False) -> None:
    """Raise unless all names are held, or none if that is fine."""
    missing = [name for name in wanted.values() if name not in held]
    if missing and not (optional and len(missing) == len(wanted)):
        raise ValueError(f"{missing[0]}: missing, want all of: {', '.join(wanted.values())} (layout {layout!r})")


def _parse(name: str, layout: str) -> tuple[str, Site | None] | None:
    """The prefix of ``name`` and its site, None for the head; None for no name of ``layout``."""
    scheme = _SCHEMES[layout]
    for leaf in scheme.head_leaves():
        if name == leaf or name.endswith("." + leaf):
            return name.removesuffix(leaf), None
    match = _LAYER.fullmatch(name)
    sublayer = scheme.controller_leaves().get(match["leaf"]) if match else None
    if match is None or sublayer is None:
        return None
    return match["prefix"], Site(int(match["layer"]), sublayer)


def _place(name: str, layout: Layout, prefix: str) -> Site | None:
    """The site that ``name`` belongs to, None for the head; ``ValueError`` that says what it is instead."""
    parsed = {known: _parse(name, known) for known in LAYOUTS}
    own = parsed.pop(layout)
    if own is not None and own[0] == prefix:
        return own[1]
    known_by = {other: found[0] == _SCHEMES[other].prefix for other, found in parsed.items() if found is not None}
    for other, standard in sorted(known_by.items(), key=lambda item: not item[1]):
        if own is None or standard:
            raise ValueError(f"{name}: a name of layout {other!r}, want layout {layout!r}")
    if own is not None:
        raise ValueError(f"{name}: got prefix {own[0]!r}, want {prefix!r} (layout {layout!r})")
    scheme = _SCHEMES[layout]
    known = [f"layers.N.{leaf}" for leaf in scheme.controller_leaves()] + list(scheme.head_leaves())
    raise ValueError(
        f"{name}: unknown, looks like an mHC parameter, want one of layout {layout!r}, behind {prefix!r}: "
        + ", ".join(known)
    )
