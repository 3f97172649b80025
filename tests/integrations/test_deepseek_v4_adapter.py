"""The contract's blocks in a DeepSeek-V4 model of transformers: how near they are, whose bytes they have, what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_engine.mhc import ops
from rl_engine.mhc.bits import same_bytes
from rl_engine.mhc.contract import CONTROLLER_RMS, ORACLE_PROFILE, PORTABLE_PROFILE, RELEASED_RMS
from rl_engine.mhc.integrations.deepseek_v4 import adapted_modules, install, model_from_state_dict, read_checkpoint
from rl_engine.mhc.nn import HyperConnection, HyperHead
from tests.integrations import hf_models as hf

UNIT = 2.0**-8  # the unit roundoff of BF16
_ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")
Model = Any


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    hf.save_wide_model(path)
    return path


@pytest.fixture
def model(wide: Path) -> Model:
    return hf.load_model(wide)


def parts(model: Model, site: str) -> tuple[Any, Any]:
    """The controller and the norm of a site such as ``0.attn_hc``."""
    index, hc = site.split(".")
    layer = model.model.layers[int(index)]
    return getattr(layer, hc), getattr(layer, dict(pair[:2] for pair in hf.SITES)[hc])


# --- near to the untouched model ---


def coefficients(model: Model, site: str, streams: Tensor, formula: str = RELEASED_RMS) -> tuple[Tensor, ...]:
    hc, _ = parts(model, site)
    p, r = ops.fp32_gemm_rms(streams.flatten(1), hc.fn, 1e-6, controller_rms=formula)
    h = hc.scale.repeat_interleave(torch.tensor([4, 4, 16])) * (r[:, None] * p) + hc.base
    return ops.hc_split_sinkhorn(h)


def relative(model: Model, formula: str = RELEASED_RMS) -> tuple[float, float]:
    """How far PRE, POST and C are from transformers': of the element itself, and of the largest of its kind."""
    with torch.no_grad(), hf.watched(model) as seen:
        model(hf.tokens())
        found = {site: coefficients(model, site, s.streams, formula) for site, s in seen.items()}
    assert len(found) == 8
    own, largest = 0.0, 0.0
    for site, s in seen.items():
        for got, want in zip(found[site], (s.pre, s.post, s.c), strict=True):
            difference = (got.double() - want.double()).abs()
            own = max(own, float((difference / want).max()))
            largest = max(largest, float(difference.max() / want.max()))
    return own, largest


@pytest.mark.parametrize("hidden", [64, 256])
def test_the_coefficients_are_those_of_transformers(hidden: int, tmp_path: Path) -> None:
    hf.save_model(tmp_path, hidden_size=hidden)
    model = hf.load_model(tmp_path)
    own, largest = relative(model)
    assert largest < 2e-6
    assert own < (2e-6 if hidden == 64 else 8e-6)  # a fold over 4D terms rounds more often the longer it is
    assert relative(model, CONTROLLER_RMS[0])[1] > 2e-6  # P1's formula is seen


def test_the_coefficients_of_wide_controllers_are_those_of_transformers(model: Model) -> None:
    own, largest = relative(model)
    assert largest < 2e-6
    assert own < 1e-5


def test_the_mix_of_transformers_is_within_the_bound_of_its_bf16_roundings(model: Model) -> None:
    with hf.watched(model) as seen:
        hf.logits(model)
    differing = 0
    for site, s in seen.items():
        hc, norm = parts(model, site)
        with torch.no_grad():
            _, _, post, c, _ = ops.mhc_pre_rmsnorm(
                s.streams, hc.fn, *hc.scale.split(1), hc.base, norm.weight, controller_rms=RELEASED_RMS
            )
            mine = ops.mhc_post(s.streams, s.y, c, post)
            crossed = ops.mhc_post(s.streams, s.y, c.transpose(1, 2), post)
        r, y = s.streams.double(), s.y.double()
        magnitude = torch.einsum("tij,tid->tjd", c.double(), r.abs()) + post.double()[:, :, None] * y.abs()[:, None]
        bound = 4.1 * UNIT * magnitude
        assert bool(((mine.double() - s.new_streams.double()).abs() <= bound).all())
        assert not bool(((crossed.double() - s.new_streams.double()).abs() <= bound).all())
        differing += int((mine != s.new_streams).sum())
    assert differing > 1000  # transformers does round in between


def test_what_enters_a_sublayer_is_within_the_bound_of_one_rounding(model: Model) -> None:
    with hf.watched(model) as seen:
        hf.logits(model)
    for site, s in seen.items():
        pre, *_ = coefficients(model, site, s.streams)
        hidden = ops.h_aggregate(pre, s.streams).double()
        magnitude = torch.einsum("ti,tid->td", pre.double(), s.streams.double().abs())
        # Both round once, and PRE differs by a few 2^-24; so nearly all elements are equal.
        assert bool(((hidden - s.hidden.double()).abs() <= 2.1 * UNIT * magnitude).all())
        assert float((hidden != s.hidden.double()).double().mean()) < 0.01


def test_the_head_is_within_the_bound_of_one_rounding(model: Model) -> None:
    calls: list[tuple[Tensor, Tensor]] = []
    model.model.hc_head.register_forward_hook(lambda _, args, out: calls.append((args[0], out)))
    hf.logits(model)
    ((streams, want),) = calls
    with install(model), torch.no_grad():
        got = model.model.hc_head(streams)
    magnitude = 1.01 * streams.double().abs().sum(-2)  # a gate is at most 1 + eps
    assert got.shape == want.shape
    assert bool(((got.double() - want.double()).abs() <= 2.1 * UNIT * magnitude).all())
    assert float((got != want).double().mean()) < 0.01


# --- the contract's own bytes ---


class _First(nn.Module):
    """The attention alone, as a sublayer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.inner(x, **kwargs)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("profile", [ORACLE_PROFILE, PORTABLE_PROFILE])
def test_a_layer_is_two_hyper_connections_forward_and_backward(model: Model, profile: str) -> None:
    layer = model.model.layers[1]
    calls: list[dict[str, Any]] = []
    handle = layer.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    with torch.no_grad():
        model(hf.tokens(), use_cache=False)  # a cache would grow with every call
    handle.remove()
    (kwargs,) = calls
    rows = torch.Generator().manual_seed(1)
    streams = torch.randn(2, 17, 4, hf.HIDDEN, generator=rows).bfloat16()
    arriving = torch.randn(2, 17, 4, hf.HIDDEN, generator=rows).bfloat16()

    blocks = []
    for (hc, norm, _), sublayer in zip(hf.SITES, (_First(layer.self_attn), layer.mlp), strict=True):
        block = HyperConnection(
            sublayer, hf.HIDDEN, controller_rms=RELEASED_RMS, numeric_profile=profile, gamma_dtype=torch.float32
        )
        own, source = block.controller, getattr(layer, hc)
        values = {"weight": source.fn, "bias": source.base, **dict(zip(_ALPHAS, source.scale.split(1), strict=True))}
        own.load_state_dict({key: value.detach().clone() for key, value in values.items()})
        block.norm.load_state_dict({"weight": getattr(layer, norm).weight.detach().clone()})
        blocks.append(block)

    attention = {key: value for key, value in kwargs.items() if key != "input_ids"}
    x = streams.clone().requires_grad_()
    want = blocks[1](blocks[0](x, **attention), input_ids=kwargs["input_ids"])
    want.backward(arriving)
    expected = {"streams": x.grad}
    for (hc, norm, _), block in zip(hf.SITES, blocks, strict=True):
        own = block.controller
        expected |= {f"{hc}.fn": own.weight.grad, f"{hc}.base": own.bias.grad, f"{norm}.weight": block.norm.weight.grad}
        expected[f"{hc}.scale"] = torch.cat([getattr(own, alpha).grad for alpha in _ALPHAS])

    z = streams.clone().requires_grad_()
    with install(model, numeric_profile=profile):
        got = layer(z, **kwargs)
        got.backward(arriving)
    grads = {"streams": z.grad} | {name: p.grad for name, p in layer.named_parameters() if name in expected}
    assert same_bytes(got.detach(), want.detach())
    assert hf.unequal({name: grads[name] for name in expected}, expected) == []


def test_the_head_is_a_hyper_head_forward_and_backward(model: Model) -> None:
    source, rows = model.model.hc_head, torch.Generator().manual_seed(2)
    streams = torch.randn(2, 5, 4, hf.HIDDEN, generator=rows).bfloat16()
    arriving = torch.randn(2, 5, hf.HIDDEN, generator=rows).bfloat16()
    head = HyperHead(hf.HIDDEN)
    named = {"weight": source.hc_fn, "alpha": source.hc_scale, "bias": source.hc_base}
    head.load_state_dict({name: value.detach().clone() for name, value in named.items()})
    x, z = streams.clone().requires_grad_(), streams.clone().requires_grad_()
    want = head(x)
    want.backward(arriving)
    with install(model):
        got = source(z)
        got.backward(arriving)
    assert same_bytes(got.detach(), want.detach())
    expected = {"streams": x.grad, **{name: parameter.grad for name, parameter in head.named_parameters()}}
    assert (
        hf.unequal({"streams": z.grad, **{name: named[name].grad for name in expected if name in named}}, expected)
        == []
    )


def test_the_gradient_of_the_embedding_has_the_order_and_the_rounding_of_the_tree(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Tensor] = []

    def expanded(*args: Any, **kwargs: Any) -> Tensor:
        kept.append(ops.expand_streams(*args, **kwargs))
        kept[-1].retain_grad()
        return kept[-1]

    def keep(_: nn.Module, __: Any, out: Tensor) -> None:
        kept.append(out)
        out.retain_grad()

    monkeypatch.setattr(adapted_modules, "expand_streams", expanded)
    model.model.embed_tokens.register_forward_hook(keep)
    with install(model):
        model(hf.tokens(), labels=hf.tokens()).loss.backward()
    embedded, streams = kept
    assert embedded.grad is not None and streams.grad is not None
    g = streams.grad.float()
    want = ((g[:, 0] + g[:, 1]) + (g[:, 2] + g[:, 3])).bfloat16().view(embedded.shape)
    assert same_bytes(embedded.grad, want + 0.0)
    assert float(embedded.grad.abs().max()) > 0


# --- a model that is used ---


def test_training_reaches_every_parameter_and_checkpointing_changes_no_byte(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, rows = hf.tokens(), counted_rows(monkeypatch)
    model.train()
    plain = gradients(model, ids)
    with install(model):
        mine = gradients(model, ids)
        assert len(rows) == 8
        # The name is another one in later versions of transformers.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        again = gradients(model, ids)
        assert len(rows) == 8 + 16
    assert hf.unequal(again, mine) == []
    assert mine.keys() == plain.keys()
    assert all(bool(g.isfinite().all()) for g in mine.values())
    for kind in ("_hc.fn", "_hc.base", "_hc.scale", "layernorm.weight"):
        names = [name for name in plain if name.endswith(kind)]
        assert len(names) == 8
        got, want = (torch.cat([(g[name] / plain[name].norm()).flatten() for name in names]) for g in (mine, plain))
        assert float(torch.cosine_similarity(got, want, dim=0)) > 0.98, kind


def gradients(model: Model, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def counted_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of every block that is run from now on."""
    rows: list[int] = []

    def counted(r_old: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(r_old.shape[0])
        return ops.mhc_pre_rmsnorm(r_old, *args, **kwargs)

    monkeypatch.setattr(adapted_modules, "mhc_pre_rmsnorm", counted)
    return rows


def test_an_optimizer_from_before_trains_the_same_parameters(model: Model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before, objects = hf.state(model), dict(model.named_parameters())
    with install(model):
        assert all(p is objects[name] for name, p in model.named_parameters())
        gradients(model, hf.tokens())
        optimizer.step()
    moved = hf.unequal(hf.state(model), before)
    assert {name for name in moved if "_hc." in name} == {name for name in before if "_hc." in name}


def test_generate_runs_with_the_blocks(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, rows = hf.tokens(2, 9), counted_rows(monkeypatch)
    with install(model):
        out = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert out.shape == (2, 15)
    assert torch.equal(out[:, :9], prompt)
    assert rows == [18] * 8 + [2] * 8 * 5


def test_hidden_states_of_every_layer_are_still_returned(model: Model) -> None:
    with install(model), torch.no_grad():
        states = model(hf.tokens(), output_hidden_states=True).hidden_states
    assert len(states) >= 4
    assert states[1].shape == (2, 17, 4, hf.HIDDEN)


def test_a_saved_model_is_loaded_with_the_same_names_and_bytes(model: Model, tmp_path: Path) -> None:
    names = list(model.state_dict())
    with install(model):
        model.save_pretrained(tmp_path)
        mine = hf.logits(model)
        assert list(model.state_dict()) == names
    saved = read_checkpoint(tmp_path / "model.safetensors", "huggingface-saved")
    held = model_from_state_dict(model.state_dict(), "huggingface")
    assert saved.head is not None and held.head is not None and same_bytes(saved.head.fn, held.head.fn)
    assert saved.controllers.keys() == held.controllers.keys()
    for site, controller in saved.controllers.items():
        assert controller.fingerprint() == held.controllers[site].fingerprint()
    loaded = hf.load_model(tmp_path)
    assert hf.unequal(hf.state(loaded), hf.state(model)) == []
    assert same_bytes(hf.logits(loaded), hf.logits(model))
    with install(loaded):
        assert same_bytes(hf.logits(loaded), mine)
