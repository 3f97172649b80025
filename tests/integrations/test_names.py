"""The names of each layout, and what is said about a name that is none."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from rl_engine.mhc.integrations.deepseek_v4 import (
    LAYOUTS,
    Site,
    controller_names,
    default_prefix,
    head_names,
    is_mhc_name,
    state_dict_of,
    take_inventory,
)
from rl_engine.mhc.integrations.deepseek_v4.state_dict import convert_state_dict, model_from_state_dict
from tests.integrations.support import D, expected, published, raw

MHC = set(expected("published"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_names_are_those_of_the_field(layout: Any) -> None:
    names = [n for i in range(2) for s in ("attn", "ffn") for n in controller_names(Site(i, s), layout).values()]
    assert sorted([*names, *head_names(layout).values()]) == sorted(expected(layout))
    assert take_inventory(expected(layout), layout).sites == tuple(
        Site(i, s) for i in range(2) for s in ("attn", "ffn")
    )
    assert take_inventory(expected(layout), layout).has_head


def test_megatron_names_in_full() -> None:
    assert controller_names(Site(7, "ffn"), "megatron") == {
        "weight": "decoder.layers.7.mlp_hyper_connection.mapping_proj.weight",
        "alpha_pre": "decoder.layers.7.mlp_hyper_connection.alpha_pre",
        "alpha_post": "decoder.layers.7.mlp_hyper_connection.alpha_post",
        "alpha_res": "decoder.layers.7.mlp_hyper_connection.alpha_res",
        "bias": "decoder.layers.7.mlp_hyper_connection.bias",
    }


def test_a_prefix_replaces_the_standard_one() -> None:
    assert [default_prefix(layout) for layout in LAYOUTS] == ["", "model.", "model.", "decoder."]
    names = controller_names(Site(0, "attn"), "huggingface", "")
    assert names == {
        "weight": "layers.0.attn_hc.fn",
        "bias": "layers.0.attn_hc.base",
        "alphas": "layers.0.attn_hc.scale",
    }
    assert head_names("megatron", "module.decoder.")["fn"] == "module.decoder.hc_head_fn"
    wrapped = {f"module.{name}": t for name, t in expected("megatron").items()}
    back = convert_state_dict(wrapped, "megatron", "published", source_prefix="module.decoder.")
    assert raw(back) == raw(expected("published"))


@pytest.mark.parametrize("prefix", ["model", ".", "a..b.", ".a.", 3])
def test_a_wrong_prefix_is_refused(prefix: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"prefix: got {prefix!r}, want '' or components")):
        take_inventory([], "published", prefix)


def test_what_is_mhc_and_what_is_not() -> None:
    assert {name for name in published() if is_mhc_name(name)} == MHC
    assert is_mhc_name("layers.0.hc_attn_foo") and is_mhc_name("x.mhc_hyper_connection.y") and is_mhc_name("a.mlp_hc.b")
    for other in ("layers.0.attn.wq_a.weight", "layers.0.ffn.gate.bias", "mtp.0.hc_attn_fn", "model.hcx.weight", ""):
        assert not is_mhc_name(other)
    with pytest.raises(TypeError, match="tensor name: got int, want str"):
        take_inventory([3], "published")  # type: ignore[list-item]


@pytest.mark.parametrize(
    "call", [default_prefix, head_names, lambda x: take_inventory([], x), lambda x: state_dict_of({}, None, x)]
)
@pytest.mark.parametrize("layout", ["hf", "", None])
def test_an_unknown_layout_is_refused(call: Any, layout: Any) -> None:
    with pytest.raises(
        ValueError, match=f"layout: got {layout!r}, want one of: published, huggingface, huggingface-saved, megatron"
    ):
        call(layout)


UNKNOWN = {
    "foo": ("published", "layers.0.hc_attn_foo"),
    "weight behind": ("published", "layers.0.hc_attn_fn.weight"),
    "leading zero": ("published", "layers.00.hc_attn_fn"),
    "other digits": ("published", "layers.\u0661.hc_attn_fn"),
    "no layer": ("published", "hc_attn_fn"),
    "negative layer": ("published", "layers.-1.hc_attn_fn"),
    "head": ("published", "hc_head_bias"),
    "hugging face": ("huggingface", "model.layers.0.attn_hc.alpha"),
    "hugging face head": ("huggingface", "model.hc_head.fn"),
    "megatron": ("megatron", "decoder.layers.0.mlp_hyper_connection.mapping_proj.bias"),
    "megatron, other module": ("megatron", "decoder.layers.0.cross_attention_hyper_connection.bias"),
    "megatron, no module": ("megatron", "decoder.layers.0.alpha_pre"),
}


@pytest.mark.parametrize(("layout", "name"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_name_that_looks_like_ours_is_refused(layout: Any, name: str) -> None:
    match = re.escape(f"{name}: unknown, looks like an mHC parameter, want one of layout {layout!r}")
    with pytest.raises(ValueError, match=match):
        take_inventory([*expected(layout), name], layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other", LAYOUTS)
def test_another_layout_is_named(layout: Any, other: Any) -> None:
    if layout != other:
        with pytest.raises(ValueError, match=f": a name of layout {other!r}, want layout {layout!r}"):
            take_inventory(expected(other), layout)


def test_another_prefix_is_named() -> None:
    base = [name.removeprefix("model.") for name in expected("huggingface")]
    with pytest.raises(ValueError, match=r"^layers\.0\.attn_hc\.fn: got prefix '', want 'model\.'"):
        take_inventory(base, "huggingface")
    with pytest.raises(ValueError, match=r"^x\.hc_head_fn: got prefix 'x\.', want ''"):
        take_inventory(["x.hc_head_fn"], "published")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_missing_name_is_named(layout: Any) -> None:
    for name in expected(layout):
        with pytest.raises(ValueError, match=f"^{re.escape(name)}: missing, want all of: .*{re.escape(name)}"):
            take_inventory([n for n in expected(layout) if n != name], layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gap", [0, 1])
def test_a_layer_gap_is_named(layout: Any, gap: int) -> None:
    names = [n for n in expected(layout, layers=3) if f"layers.{gap}." not in n]
    match = f"^{re.escape(default_prefix(layout))}layers.{gap}: missing, want layers 0 to 2 without a gap"
    with pytest.raises(ValueError, match=match):
        take_inventory(names, layout)


def test_a_far_layer_is_a_gap_and_not_a_loop() -> None:
    with pytest.raises(ValueError, match=r"layers\.0: missing, want layers 0 to 999999"):
        take_inventory([f"layers.999999.hc_attn_{part}" for part in ("fn", "base", "scale")], "published")


@pytest.mark.parametrize("layer", [-1, True, 1.0, "0"])
def test_a_site_needs_a_layer(layer: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"site.layer: got {layer!r}, want an integer of at least 0")):
        Site(layer, "attn")


def test_a_site_needs_a_sublayer_and_does_not_change() -> None:
    with pytest.raises(ValueError, match=r"site\.sublayer: got 'mlp', want one of: attn, ffn"):
        Site(0, "mlp")  # type: ignore[arg-type]
    assert str(Site(3, "ffn")) == "layer 3 ffn" and Site(0, "ffn") < Site(1, "attn")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Site(0, "attn").layer = 1  # type: ignore[misc]


def test_the_hugging_face_names_are_those_of_transformers() -> None:
    """A model of transformers has the names, shapes and dtype; its own conversion makes the same names."""
    transformers = pytest.importorskip("transformers", reason="the bench extra is not installed")
    config = transformers.DeepseekV4Config(
        hidden_size=D,
        num_hidden_layers=2,
        vocab_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    )
    with torch.device("meta"):
        state = transformers.DeepseekV4ForCausalLM(config).state_dict()
    wanted = {name: (tuple(t.shape), t.dtype) for name, t in expected("huggingface").items()}
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.items() if is_mhc_name(name)} == wanted
    assert len(model_from_state_dict(state, "huggingface").controllers) == 4

    conversion = pytest.importorskip("transformers.conversion_mapping")
    renamed = {name: f"{name}" for name in MHC}
    for step in conversion.get_checkpoint_conversion_mapping("deepseek_v4"):
        if type(step).__name__ == "WeightRenaming":
            (pattern,), (target,) = step.source_patterns, step.target_patterns
            renamed = {old: re.sub(pattern, target, new) for old, new in renamed.items()}
    ours = dict(zip(expected("published"), expected("huggingface"), strict=True))
    assert {old: f"model.{new}" for old, new in renamed.items()} == ours
