"""The table of backends: what is in it, how it changes, and that nothing outside it ever runs."""

from __future__ import annotations

import pytest
import torch

from rl_engine.mhc import ops
from rl_engine.mhc.contract import ORACLE_PROFILE, PORTABLE_PROFILE
from tests.ops.support import NAMES, PROFILES, calls


def test_the_built_in_entries() -> None:
    assert ops.registered_backends() == {("cpu", ORACLE_PROFILE): "native", ("cpu", PORTABLE_PROFILE): "native"}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_backend_is_loaded_once(profile: str) -> None:
    provider = ops.backend_for("cpu", profile)
    assert (provider.name, provider.numeric_profile) == ("native", profile)
    assert ops.backend_for("cpu", profile) is provider


def test_registering_again_replaces() -> None:
    before = ops.backend_for("cpu", ORACLE_PROFILE)
    with ops.using_backend("cpu", ORACLE_PROFILE, "reference") as provider:
        assert provider.name == "reference"
        assert ops.backend_for("cpu", ORACLE_PROFILE) is provider
        ops.register_backend("cpu", ORACLE_PROFILE, "tests.ops.providers:Recording")
        assert ops.backend_for("cpu", ORACLE_PROFILE).name == "recording"
        assert ops.backend_for("cpu", PORTABLE_PROFILE).name == "native"
    assert ops.backend_for("cpu", ORACLE_PROFILE).name == before.name


def test_an_entry_of_a_block_is_gone_after_it() -> None:
    with ops.using_backend("cuda", ORACLE_PROFILE, "reference"):
        assert ("cuda", ORACLE_PROFILE) in ops.registered_backends()
    assert ("cuda", ORACLE_PROFILE) not in ops.registered_backends()
    with pytest.raises(NotImplementedError):
        ops.backend_for("cuda", ORACLE_PROFILE)


def test_an_entry_that_cannot_be_loaded_is_gone_too() -> None:
    with pytest.raises(ValueError, match="cannot load"), ops.using_backend("cpu", ORACLE_PROFILE, "no.module:Nothing"):
        raise AssertionError("not reached")
    assert ops.backend_for("cpu", ORACLE_PROFILE).name == "native"


@pytest.mark.parametrize(("device", "profile"), [("cuda", ORACLE_PROFILE), ("cpu", "another-profile")])
def test_what_is_not_registered_is_refused(device: str, profile: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        ops.backend_for(device, profile)
    message = str(caught.value)
    assert "fail-closed" in message and repr(device) in message and repr(profile) in message
    assert f"(cpu, {ORACLE_PROFILE}): native" in message


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_of_an_unregistered_profile_is_refused(name: str) -> None:
    call = calls(PROFILES[0])[name]
    call.settings["numeric_profile"] = "another-profile"
    for mode in (torch.no_grad, torch.enable_grad):
        with mode(), pytest.raises(NotImplementedError, match=r"another-profile.*fail-closed"):
            call.outputs()


def test_a_provider_of_another_device_or_profile_is_refused() -> None:
    with (
        pytest.raises(NotImplementedError, match=r"device: want 'cpu'.*fail-closed"),
        ops.using_backend("cpu", ORACLE_PROFILE, "tests.ops.providers:OtherDevice"),
    ):
        raise AssertionError("not reached")
    with (
        pytest.raises(NotImplementedError, match=r"numeric_profile: got.*fail-closed"),
        ops.using_backend("cpu", PORTABLE_PROFILE, "tests.ops.providers:OtherProfile"),
    ):
        raise AssertionError("not reached")


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(TypeError, match="spec: got type"):
        ops.register_backend("cpu", ORACLE_PROFILE, object)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device_type: got ''"):
        ops.register_backend("", ORACLE_PROFILE, "native")
