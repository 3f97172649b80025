"""The adapter takes its blocks out again, byte by byte, and refuses what the contract does not cover."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rl_engine.mhc.bits import same_bytes
from rl_engine.mhc.integrations.deepseek_v4 import Installation, adapted_modules, install
from tests.integrations import hf_models as hf

Model = Any


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    hf.save_wide_model(path)
    return path


@pytest.fixture
def model(wide: Path) -> Model:
    return hf.load_model(wide)


# --- given back ---


def test_restore_gives_back_every_byte(model: Model) -> None:
    before, tensors = hf.logits(model), hf.state(model)
    attributes = [set(vars(layer)) for layer in model.model.layers]
    classes = [type(module) for module in model.modules()]
    installation = install(model)
    assert isinstance(installation, Installation) and installation.installed
    changed = hf.logits(model)
    installation.restore()
    installation.restore()
    assert not installation.installed
    assert not same_bytes(changed, before)
    assert same_bytes(hf.logits(model), before)
    assert hf.unequal(hf.state(model), tensors) == []
    assert [set(vars(layer)) for layer in model.model.layers] == attributes
    assert [type(module) for module in model.modules()] == classes


def test_the_blocks_are_taken_out_after_an_error(model: Model) -> None:
    before = hf.logits(model)
    with pytest.raises(KeyError), install(model):
        raise KeyError
    assert same_bytes(hf.logits(model), before)


def test_a_copy_and_a_pickle_keep_the_blocks(model: Model) -> None:
    before = hf.logits(model)
    with install(model):
        mine, copied = hf.logits(model), copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
    buffer.seek(0)
    assert same_bytes(hf.logits(copied), mine)
    assert same_bytes(hf.logits(torch.load(buffer, weights_only=False)), mine)
    assert same_bytes(hf.logits(model), before)


def test_restore_refuses_a_layer_that_became_something_else(model: Model) -> None:
    installation = install(model)
    layer = model.model.layers[2]
    layer.__class__ = type("Other", (type(layer),), {})
    with pytest.raises(RuntimeError, match=r"^model\.layers\.2: got .*\.Other, want rl_engine\."):
        installation.restore()
    assert type(model.model.layers[0]) is adapted_modules.DeepseekV4DecoderLayer


# --- refused ---


def _set(path: str, value: object) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        owner, _, name = path.rpartition(".")
        target = model.get_submodule(owner) if not owner.endswith("config") else model.model.config
        setattr(target, name, value)

    return change


def _unweighted_eps(model: Model) -> None:
    norm = model.model.layers[1].attn_hc.input_norm
    name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"  # by the version of transformers
    setattr(norm, name, 1e-7)


def _cast(model: Model) -> None:
    model.bfloat16()


def _to_fp32(model: Model) -> None:
    model.model.embed_tokens.float()


def _hook(model: Model) -> None:
    model.model.layers[1].ffn_hc.register_forward_hook(lambda *_: None)


def _forward(model: Model) -> None:
    layer = model.model.layers[1]
    layer.forward = layer.forward


def _narrow(model: Model) -> None:
    layer = model.model.layers[3]
    layer.attn_hc.fn = nn.Parameter(layer.attn_hc.fn.detach()[:20].clone())


def _other_norm(model: Model) -> None:
    model.model.layers[0].input_layernorm = nn.RMSNorm(hf.HIDDEN)


def _half_norm(model: Model) -> None:
    model.model.layers[2].post_attention_layernorm.half()


REFUSED: dict[str, tuple[Callable[[Model], None], type[Exception], str]] = {
    "streams": (_set("model.config.hc_mult", 2), ValueError, r"model\.config\.hc_mult: got 2, want 4 "),
    "iterations": (
        _set("model.config.hc_sinkhorn_iters", 3),
        ValueError,
        r"model\.config\.hc_sinkhorn_iters: got 3, want 20 ",
    ),
    "eps": (_set("model.config.hc_eps", 1e-5), ValueError, r"model\.config\.hc_eps: got 1e-05, want 1e-06 "),
    "norm eps": (_set("model.config.rms_norm_eps", 1e-5), ValueError, r"model\.config\.rms_norm_eps: got 1e-05, want "),
    "a module's own iterations": (
        _set("model.layers.3.ffn_hc.hc_sinkhorn_iters", 19),
        ValueError,
        r"model\.layers\.3\.ffn_hc\.hc_sinkhorn_iters: got 19, want 20 ",
    ),
    "a module's own eps": (
        _unweighted_eps,
        ValueError,
        r"model\.layers\.1\.attn_hc\.input_norm\.(variance_epsilon|eps): got 1e-07, want 1e-06 ",
    ),
    "a norm's own eps": (
        _set("model.layers.1.input_layernorm.variance_epsilon", 1e-7),
        ValueError,
        r"model\.layers\.1\.input_layernorm\.variance_epsilon: got 1e-07, want 1e-06 ",
    ),
    "a cast of the whole model": (
        _cast,
        TypeError,
        r"model\.layers\.0\.attn_hc\.fn: got dtype torch\.bfloat16, want torch\.float32, .*; load the model with ",
    ),
    "streams of FP32": (
        _to_fp32,
        TypeError,
        r"model\.embed_tokens\.weight: got dtype torch\.float32, want torch\.bfloat16",
    ),
    "gamma of FP16": (
        _half_norm,
        TypeError,
        r"model\.layers\.2\.post_attention_layernorm\.weight: got dtype torch\.float16, want torch\.bfloat16 or ",
    ),
    "a narrow controller": (
        _narrow,
        ValueError,
        r"model\.layers\.3\.attn_hc\.fn: got shape \(20, 256\), want \(24, 256\)",
    ),
    "a head's own eps": (_set("model.hc_head.eps", 0.0), ValueError, r"model\.hc_head\.eps: got 0\.0, want 1e-06 "),
    "a cast of the head": (
        lambda model: model.model.hc_head.bfloat16(),
        TypeError,
        r"model\.hc_head\.hc_fn: got dtype torch\.bfloat16, want torch\.float32, .*; load the model with ",
    ),
    "another norm": (
        _other_norm,
        NotImplementedError,
        r"model\.layers\.0\.input_layernorm: got torch\.nn\..*RMSNorm, want transformers\..*\(fail-closed\)",
    ),
    "a hook that would not run": (
        _hook,
        NotImplementedError,
        r"model\.layers\.1\.ffn_hc: got forward_hooks, want none, .*\(fail-closed\)",
    ),
    "a wrapped forward": (
        _forward,
        NotImplementedError,
        r"model\.layers\.1\.forward: got one of the instance's own, want the class's \(fail-closed\)",
    ),
    "blocks twice": (
        lambda model: setattr(model, "kept", install(model)),
        NotImplementedError,
        r"model\.layers\.0: got rl_engine\..*, want transformers\..*\(fail-closed\)",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_the_contract_does_not_cover_is_refused_whole(
    model: Model, change: Callable[[Model], None], error: type[Exception], message: str
) -> None:
    change(model)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(error, match="^" + message):
        install(model)
    assert [type(module) for module in model.modules()] == classes


def test_a_model_of_another_kind_and_an_unknown_backend_are_refused(model: Model) -> None:
    with pytest.raises(TypeError, match=r"^model: got Linear with 0 DeepseekV4Model, want one of them"):
        install(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"^model: got ModuleList with 2 DeepseekV4Model, want one"):
        install(nn.ModuleList([model, copy.deepcopy(model)]))
    with pytest.raises(NotImplementedError, match=r"no backend for device 'cpu' under 'unknown' \(fail-closed\)"):
        install(model, numeric_profile="unknown")
    with pytest.raises(NotImplementedError, match=r"no backend for device 'meta' .*fail-closed"):
        install(copy.deepcopy(model).to("meta"))


def test_what_turns_up_only_in_a_call_is_refused_there(model: Model) -> None:
    with install(model):
        layer = model.model.layers[0]
        with pytest.raises(TypeError, match=r"^layers\.0: hidden_states: got dtype torch\.float32, want torch\.bfl"):
            layer(torch.zeros(1, 3, 4, hf.HIDDEN))
        with pytest.raises(ValueError, match=r"^layers\.0: hidden_states: got streams that differ, want the embedding"):
            layer(torch.randn(1, 3, 4, hf.HIDDEN).bfloat16().requires_grad_())
        with pytest.raises(TypeError, match=r"^hc_head: x: got dtype torch\.float32, want torch\.bfloat16"):
            model.model.hc_head(torch.zeros(1, 3, 4, hf.HIDDEN))
        layer.mlp.register_forward_hook(lambda _, __, out: out.float())
        with pytest.raises(TypeError, match=r"^layers\.0\.mlp: output: got dtype torch\.float32, want torch\.bfloat16"):
            hf.logits(model)


def test_the_package_needs_transformers_for_this_alone() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import torch; from rl_engine.mhc.integrations.deepseek_v4 import install\n"
        "assert 'rl_engine.mhc.ops' not in sys.modules\n"
        "try: install(torch.nn.Identity())\n"
        "except ImportError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("transformers: ") and run.stdout.rstrip().endswith("the extra `hf` installs")


def test_a_wrapper_of_the_model_is_accepted(model: Model) -> None:
    wrapped = nn.Sequential(model)
    with install(wrapped):
        assert type(model.model.layers[0]) is adapted_modules.DeepseekV4DecoderLayer
    with install(model.model):
        assert type(model.model.layers[0]) is adapted_modules.DeepseekV4DecoderLayer
