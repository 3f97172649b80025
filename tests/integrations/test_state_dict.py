"""State dicts in and out of every layout, byte for byte, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_engine.mhc.contract import ControllerParams, LayerContract
from rl_engine.mhc.integrations.deepseek_v4 import (
    LAYOUTS,
    HeadParams,
    Site,
    controllers_from_state_dict,
    convert_state_dict,
    head_from_state_dict,
    model_from_state_dict,
    state_dict_of,
)
from tests.integrations.support import EDGE_BITS, D, bits_of, expected, from_bits, model_bits, published, raw

PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_layout_becomes_every_layout_and_back(source: Any, target: Any) -> None:
    there = convert_state_dict(expected(source), source, target)
    assert raw(there) == raw(expected(target))
    assert raw(convert_state_dict(there, target, source)) == raw(expected(source))


@given(st.data(), st.sampled_from(PAIRS), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_any_encodings_survive(data: st.DataObject, pair: Any, layers: int, hidden: int, with_head: bool) -> None:
    source, target = pair
    encoding = st.integers(0, 2**32 - 1) | st.sampled_from(EDGE_BITS)
    shapes = {name: tuple(t.shape) for name, t in expected(source, layers, hidden).items()}
    tensors = {}
    for name, shape in shapes.items():
        if with_head or "hc_head" not in name:
            pattern = data.draw(st.lists(encoding, min_size=1, max_size=5))
            count = int(torch.Size(shape).numel())
            tensors[name] = from_bits([pattern[i % len(pattern)] for i in range(count)]).reshape(shape)
    there = convert_state_dict(tensors, source, target)
    assert set(there) == {n for n in expected(target, layers, hidden) if with_head or "hc_head" not in n}
    assert raw(convert_state_dict(there, target, source)) == raw(tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_part_goes_where_it_belongs(layout: Any) -> None:
    old = published()
    controllers = controllers_from_state_dict(expected(layout), layout)
    assert list(controllers) == [Site(0, "attn"), Site(0, "ffn"), Site(1, "attn"), Site(1, "ffn")]
    for site, controller in controllers.items():
        stem = f"layers.{site.layer}.hc_{site.sublayer}_"
        assert bits_of(controller.weight) == bits_of(old[stem + "fn"])
        assert bits_of(controller.bias) == bits_of(old[stem + "base"])
        for i, alpha in enumerate((controller.alpha_pre, controller.alpha_post, controller.alpha_res)):
            assert bits_of(alpha) == bits_of(old[stem + "scale"][i : i + 1])
        controller.validate(LayerContract(hidden=D))
    head = head_from_state_dict(expected(layout), layout)
    head.validate()
    assert head.hidden == D
    assert [bits_of(t) for t in (head.fn, head.base, head.scale)] == [
        bits_of(old["hc_head_" + part]) for part in ("fn", "base", "scale")
    ]


def test_other_tensors_are_not_even_looked_at() -> None:
    class Recording(Mapping[str, Tensor]):
        def __init__(self, tensors: dict[str, Tensor]) -> None:
            self.tensors, self.taken = tensors, list[str]()

        def __getitem__(self, name: str) -> Tensor:
            self.taken.append(name)
            return self.tensors[name]

        def __iter__(self) -> Iterator[str]:
            return iter(self.tensors)

        def __len__(self) -> int:
            return len(self.tensors)

    tensors = Recording(published())
    assert model_bits(model_from_state_dict(tensors, "published")) == model_bits(
        model_from_state_dict(expected("megatron"), "megatron")
    )
    assert sorted(tensors.taken) == sorted(expected("published"))


def test_alphas_have_memory_of_their_own_and_nothing_else_is_copied() -> None:
    tensors = {name: torch.nn.Parameter(t) for name, t in expected("published").items()}
    model = model_from_state_dict(tensors, "published")
    controller = model.controllers[Site(0, "attn")]
    assert controller.weight is tensors["layers.0.hc_attn_fn"]
    before = bits_of(tensors["layers.0.hc_attn_scale"])
    for alpha in controller.alphas:
        assert alpha.untyped_storage().nbytes() == 4 and not alpha.requires_grad
        alpha.fill_(7.0)
    assert bits_of(tensors["layers.0.hc_attn_scale"]) == before
    out = state_dict_of(model.controllers, model.head, "published")
    assert not any(t.requires_grad for t in out.values())
    assert out["layers.0.hc_attn_fn"].data_ptr() == controller.weight.data_ptr()


def test_no_head_and_no_layers() -> None:
    layers = {n: t for n, t in expected("published").items() if "head" not in n}
    assert model_from_state_dict(layers, "published").head is None
    assert raw(convert_state_dict(layers, "published", "published")) == raw(layers)
    with pytest.raises(
        ValueError, match=r"head: missing in the state dict, want model\.hc_head\.hc_fn, .*'huggingface'"
    ):
        head_from_state_dict({}, "huggingface")
    head = {n: t for n, t in expected("published").items() if "head" in n}
    assert head_from_state_dict(head, "published").hidden == D
    with pytest.raises(ValueError, match=r"controllers: no layer in the state dict, want layers\.0\.hc_attn_fn, "):
        controllers_from_state_dict(head, "published")


FAULTS: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "bfloat16": (
        lambda t: t.bfloat16(),
        TypeError,
        r"got dtype torch\.bfloat16, want torch\.float32; .* \.to\(torch\.float32\)",
    ),
    "float64": (lambda t: t.double(), TypeError, r"got dtype torch\.float64, want torch\.float32"),
    "a list": (lambda t: t.tolist(), TypeError, r"got list, want a torch\.Tensor"),
    "one more axis": (lambda t: t[None], ValueError, r"got shape \(1, .*want"),
    "one row more": (lambda t: torch.cat([t, t[:1]]), ValueError, r"got shape .*want"),
    "no rows": (lambda t: t[:0], ValueError, r"got shape \(0.*want"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("change", "kind", "message"), FAULTS.values(), ids=FAULTS)
def test_each_wrong_tensor_is_named(layout: Any, change: Any, kind: type[Exception], message: str) -> None:
    for name in expected(layout, layers=1):
        tensors: dict[str, Any] = expected(layout, layers=1)
        tensors[name] = change(tensors[name])
        with pytest.raises(kind, match=f"^{re.escape(name)}: {message}"):
            model_from_state_dict(tensors, layout)


@pytest.mark.parametrize("width", [0, 30, 33])
def test_a_width_that_is_no_four_d_is_named(width: int) -> None:
    for name, rows in (("layers.0.hc_attn_fn", 24), ("hc_head_fn", 4)):
        tensors = expected("published", layers=1) | {name: torch.zeros(rows, width)}
        with pytest.raises(ValueError, match=re.escape(f"{name}: got shape ({rows}, {width}), want [{rows}, 4D]")):
            model_from_state_dict(tensors, "published")


def test_another_d_is_named() -> None:
    for name, rows in (("layers.1.hc_ffn_fn", 24), ("hc_head_fn", 4)):
        tensors = expected("published") | {name: torch.zeros(rows, 4 * D + 4)}
        with pytest.raises(ValueError, match=rf"^{name}: got D=9, want D=8 \(that of layers\.0\.hc_attn_fn\)"):
            model_from_state_dict(tensors, "published")


def test_another_device_is_named() -> None:
    tensors = expected("published") | {"layers.0.hc_ffn_base": torch.zeros(24, device="meta")}
    with pytest.raises(ValueError, match=r"^layers\.0\.hc_ffn_base: got device meta, want cpu"):
        model_from_state_dict(tensors, "published")


# --- the way back ---

PARTS = ("weight", "alpha_pre", "alpha_post", "alpha_res", "bias")


def controllers() -> dict[Site, Any]:
    return dict(controllers_from_state_dict(expected("published"), "published"))


def head() -> HeadParams:
    return head_from_state_dict(expected("published"), "published")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("change", "kind", "message"), FAULTS.values(), ids=FAULTS)
def test_each_wrong_parameter_is_named(layout: Any, change: Any, kind: type[Exception], message: str) -> None:
    site = Site(1, "ffn")
    for part in PARTS:
        wrong = controllers()
        wrong[site] = dataclasses.replace(wrong[site], **{part: change(getattr(wrong[site], part))})
        with pytest.raises(kind, match=rf"^controllers\[layer 1 ffn\]\.{part}: {message}"):
            state_dict_of(wrong, head(), layout)
    for part in ("fn", "base", "scale"):
        broken = dataclasses.replace(head(), **{part: change(getattr(head(), part))})
        with pytest.raises(kind, match=rf"^head\.{part}: {message}"):
            state_dict_of(controllers(), broken, layout)
        with pytest.raises(kind, match=rf"^head\.{part}: {message}"):
            broken.validate()


def test_two_wrong_alphas_do_not_make_a_right_scale() -> None:
    wrong = controllers()
    site = Site(0, "attn")
    wrong[site] = dataclasses.replace(wrong[site], alpha_pre=torch.zeros(2), alpha_post=torch.zeros(0))
    with pytest.raises(ValueError, match=r"alpha_pre: got shape \(2,\), want \(1,\)"):
        state_dict_of(wrong, None, "published")


@pytest.mark.parametrize("site", [Site(0, "attn"), Site(0, "ffn"), Site(1, "attn")], ids=str)
def test_a_missing_site_is_named(site: Site) -> None:
    rest = {s: c for s, c in controllers().items() if s != site}
    match = rf"^controllers\[{site}\]: missing, want both sublayers of layers 0 to 1"
    with pytest.raises(ValueError, match=match):
        state_dict_of(rest, None, "megatron")


def test_what_is_no_parameter_is_named() -> None:
    some: Any = {(0, "attn"): controllers()[Site(0, "attn")]}
    with pytest.raises(TypeError, match="controllers: got a key of type tuple, want Site"):
        state_dict_of(some, None, "published")
    with pytest.raises(TypeError, match=r"controllers\[layer 1 attn\]: got dict, want ControllerParams"):
        state_dict_of({**controllers(), Site(1, "attn"): {}}, None, "published")
    other: Any = ControllerParams(*(torch.zeros(1) for _ in PARTS))
    with pytest.raises(TypeError, match="head: got ControllerParams, want HeadParams or None"):
        state_dict_of(controllers(), other, "published")


def test_a_head_of_another_width_is_named() -> None:
    wide = head_from_state_dict(expected("published", hidden=D + 1), "published")
    with pytest.raises(
        ValueError, match=r"^head\.fn: got D=9, want D=8 \(that of controllers\[layer 0 attn\]\.weight\)"
    ):
        state_dict_of(controllers(), wide, "published")


def test_the_order_of_the_sites_does_not_matter() -> None:
    backwards = dict(reversed(list(controllers().items())))
    assert list(state_dict_of(backwards, head(), "published")) == list(expected("published"))
