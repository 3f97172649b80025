"""What the build gives: the wheel with and without the native backend, the editable install, and readable refusals.

The wheel is built in the folder of ``make setup``, where the backend is compiled already.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rl_engine.mhc.backends.native.library import ABI_VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[1]
GOLDENS = REPOSITORY / "tests" / "fixtures" / "p1"
LIBRARY = "rl_engine/mhc/backends/native/librl_mhc_native.so"
WITHOUT = "cmake.define.RL_MHC_NATIVE"
NAMED_ONCE = "pip install . -C cmake.define.RL_MHC_NATIVE=OFF"
BUILD = (
    "import sys; from scikit_build_core import build; kind, folder, *given = sys.argv[1:]; "
    "getattr(build, 'build_' + kind)(folder, dict(item.split('=', 1) for item in given))"
)


def build(
    kind: str, folder: Path, *settings: str, source: Path = REPOSITORY, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``build_wheel`` or ``build_editable``, as pip calls them, into ``folder``."""
    command = [sys.executable, "-c", BUILD, kind, str(folder), *settings]
    inherited = {key: value for key, value in os.environ.items() if key not in {"CXX", "CXXFLAGS", "LDFLAGS"}}
    return subprocess.run(command, cwd=source, env=inherited | environment, capture_output=True, text=True, check=False)


def contents(folder: Path) -> dict[str, bytes]:
    """Path to bytes of every file in the one wheel in ``folder``."""
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def shipped(files: dict[str, bytes]) -> set[str]:
    return {name for name in files if ".dist-info/" not in name}


def expected() -> set[str]:
    """What every wheel holds: the modules of the checkout and the golden files, under the package's name."""
    package = REPOSITORY / "rl_engine" / "mhc"
    modules = {str(path.relative_to(REPOSITORY)) for path in package.rglob("*.py")}
    return (
        modules | {"rl_engine/mhc/py.typed"} | {f"rl_engine/mhc/_golden/{path.name}" for path in GOLDENS.glob("*.json")}
    )


@pytest.fixture(scope="module")
def native_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel as it is published; one build at a time, for the folder is everyone's."""
    folder = tmp_path_factory.mktemp("wheel")
    REPOSITORY.joinpath("build").mkdir(exist_ok=True)
    with REPOSITORY.joinpath("build", "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = build("wheel", folder)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture
def no_compiler(tmp_path: Path) -> str:
    """A search path without any compiler."""
    folder = tmp_path / "empty"
    folder.mkdir()
    return str(folder)


# --- the wheel ---


def test_the_wheel_holds_the_package_the_library_and_the_goldens(native_wheel: Path) -> None:
    files = contents(native_wheel)
    assert shipped(files) == expected() | {LIBRARY}
    assert "rl_engine/__init__.py" not in files
    for path in GOLDENS.glob("*.json"):
        assert files[f"rl_engine/mhc/_golden/{path.name}"] == path.read_bytes()
    (entry_points,) = [name for name in files if name.endswith("/entry_points.txt")]
    assert "rl-mhc = rl_engine.mhc.cli:main" in files[entry_points].decode()


def test_one_wheel_serves_every_python(native_wheel: Path) -> None:
    (wheel,) = native_wheel.glob("*.whl")
    version = tomllib.loads(REPOSITORY.joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert re.fullmatch(rf"rl_engine_mhc-{re.escape(version)}-py3-none-[a-z0-9_]+\.whl", wheel.name), wheel.name


def test_the_library_of_the_wheel_needs_neither_python_nor_torch(native_wheel: Path, tmp_path: Path) -> None:
    code = contents(native_wheel)[LIBRARY]
    for name in (b"libpython", b"libtorch", b"libc10", b"libstdc++.so", b"libgcc_s.so", b"libgomp"):
        assert name not in code
    path = tmp_path / "library.so"
    path.write_bytes(code)
    assert ctypes.CDLL(str(path)).mhc_abi_version() == ABI_VERSION


def test_the_library_exports_its_interface_alone(native_wheel: Path, tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(contents(native_wheel)[LIBRARY])
    header = REPOSITORY.joinpath("csrc/mhc/include/mhc/abi.h").read_text(encoding="utf-8")
    assert {name for _, name in symbols(path, "--dynamic")} == set(re.findall(r"\b(mhc_\w+)\(", header))


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """Kind and name of what an object file defines."""
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    run = subprocess.run(
        ["nm", "--defined-only", "--format=posix", *options, str(path)], capture_output=True, text=True, check=True
    )
    return [(line.split()[1], line.split()[0]) for line in run.stdout.splitlines()]


def shared_between_levels(defined: list[tuple[str, str]], level: str) -> list[str]:
    """The functions that the linker would merge with those of another level.

    A function of a header, or one that the compiler makes of a template, is in the object file of every level. The
    linker keeps any one of them for all, and a plain processor would run instructions that it does not have.
    """
    return [name for kind, name in defined if kind == "W" and f"{len(level)}{level}" not in name]


def test_no_level_shares_code_with_another(native_wheel: Path) -> None:
    (wheel,) = native_wheel.glob("*.whl")
    folder = REPOSITORY / "build" / wheel.stem.split("-", 2)[2] / "csrc" / "mhc" / "CMakeFiles"
    objects = {path: path.parts[-3] for path in folder.glob("rl_mhc_kernels_*.dir/kernels/*.o")}
    assert objects
    for path, target in objects.items():
        level = target.removeprefix("rl_mhc_kernels_").removesuffix(".dir")
        assert shared_between_levels(symbols(path), level) == [], path


def test_shared_code_is_found() -> None:
    own, other = "_ZN3mhc4avx24foldILi4EEEvv", "_ZNSt6vectorIfSaIfEE17_M_default_appendEm"
    defined = [("W", own), ("W", other), ("T", "_ZN3mhc4avx23runEv"), ("t", "_ZL4helpv"), ("V", "_ZN3mhc5tableE")]
    assert shared_between_levels(defined, "avx2") == [other]
    assert shared_between_levels(defined, "avx512") == [own, other]


# --- without the native backend, and without a compiler ---


def test_the_pure_wheel_needs_no_compiler(tmp_path: Path, no_compiler: str) -> None:
    run = build("wheel", tmp_path, f"{WITHOUT}=OFF", f"build-dir={tmp_path}/build", PATH=no_compiler)
    assert run.returncode == 0, run.stdout + run.stderr
    assert shipped(contents(tmp_path)) == expected()


def test_no_compiler_is_one_readable_message(tmp_path: Path, no_compiler: str) -> None:
    run = build("wheel", tmp_path, f"build-dir={tmp_path}/build", PATH=no_compiler)
    said = " ".join((run.stdout + run.stderr).split())
    assert run.returncode != 0
    assert said.count("CMake Error") == 1
    assert "No C++ compiler was found. Install one (g++ 12 or clang 15, or newer" in said
    assert NAMED_ONCE in said


def test_a_compiler_without_cxx20_is_one_readable_message(tmp_path: Path) -> None:
    real = shutil.which("g++") or shutil.which("clang++")
    if real is None:
        pytest.skip("needs a compiler")
    old = tmp_path / "old-compiler"
    old.write_text(f'#!/bin/sh\nfor word; do [ "$word" = -std=c++20 ] && exit 1; done\nexec {real} "$@"\n')
    old.chmod(0o755)
    run = build("wheel", tmp_path, f"build-dir={tmp_path}/build", CXX=str(old))
    said = " ".join((run.stdout + run.stderr).split())
    assert run.returncode != 0
    assert said.count("CMake Error") == 1
    assert f"The C++ compiler cannot compile C++20: {old}" in said
    assert NAMED_ONCE in said


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-march=native"])
def test_flags_that_break_the_contract_are_refused(flag: str, tmp_path: Path) -> None:
    run = build("wheel", tmp_path, f"build-dir={tmp_path}/build", CXXFLAGS=f"-g {flag}")
    said = " ".join((run.stdout + run.stderr).split())
    assert run.returncode != 0
    assert f"The C++ flags hold {flag}, " in said


# --- the editable install ---


def test_an_editable_install_is_the_checkout_alone(tmp_path: Path, no_compiler: str) -> None:
    checkout, folder = tmp_path / "checkout", tmp_path / "wheel"
    for name in ("rl_engine", "csrc", "tests/fixtures"):
        shutil.copytree(REPOSITORY / name, checkout / name)
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, checkout / name)
    checkout.joinpath(LIBRARY).write_bytes(b"of an earlier install")
    folder.mkdir()
    run = build("editable", folder, f"{WITHOUT}=OFF", source=checkout, PATH=no_compiler)
    assert run.returncode == 0, run.stdout + run.stderr
    files = contents(folder)
    assert files["_rl_engine_mhc.pth"].decode() == f"{checkout}\n"
    assert not [name for name in files if name.startswith("rl_engine/")]
    assert not checkout.joinpath(LIBRARY).exists()
