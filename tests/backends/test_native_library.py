"""The native backend's library: what ctypes is told is what abi.h says, and a wrong one is refused in one line."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from rl_engine.mhc.backends.native import library
from rl_engine.mhc.backends.native.library import ABI_VERSION, ISA_LEVELS, Call, NativeBackendUnavailable, Rows

REPOSITORY = Path(__file__).resolve().parents[2]
HEADER = REPOSITORY.joinpath("csrc/mhc/include/mhc/abi.h").read_text(encoding="utf-8")
CTYPES = {
    "void": None,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "struct mhc_rows": Rows,
    "const struct mhc_call*": ctypes.POINTER(Call),
}


def declared(header: str) -> dict[str, tuple[type | None, tuple[type | None, ...]]]:
    """Function to result and arguments, read from the text of the header."""
    code = re.sub(r"/\*.*?\*/", " ", header, flags=re.S)
    found = {}
    for result, name, arguments in re.findall(r"MHC_EXPORT\s+([\w ]+?)\s+(mhc_\w+)\(([^)]*)\);", code):
        given = [" ".join(argument.split()) for argument in arguments.split(",")]
        found[name] = (CTYPES[result], tuple(as_ctypes(argument) for argument in given if argument != "void"))
    return found


def as_ctypes(argument: str) -> type | None:
    """``c_float`` of ``float eps``, an address of ``const float* x``; the packed arguments of the block are bytes."""
    kind = argument if argument.endswith("*") else argument.rpartition(" ")[0]
    if kind in CTYPES:
        return CTYPES[kind]
    assert kind.endswith("*"), argument
    return ctypes.c_char_p if "_args*" in kind else ctypes.c_void_p


def fields(header: str, struct: str) -> list[tuple[str, str]]:
    """Name and type of each field of a struct of the header, in order."""
    body = re.search(rf"struct {struct} \{{(.*?)\}};", re.sub(r"/\*.*?\*/", " ", header, flags=re.S), re.S)
    assert body is not None
    pairs = [re.fullmatch(r"(.+?)\s*(\w+)", line.strip()) for line in body[1].split(";") if line.strip()]
    return [(pair[2], pair[1]) for pair in pairs if pair is not None]


def enumerators(header: str, name: str) -> dict[str, int]:
    body = re.search(rf"enum {name} \{{(.*?)\}};", header, re.S)
    assert body is not None
    return {key: int(value) for key, value in re.findall(r"MHC_(\w+) = (\d+)", body[1])}


def compiled(path: Path, source: str) -> Path:
    """A shared library of a few lines of C."""
    command = ["g++", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    try:
        subprocess.run(command, input=source, text=True, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs g++")
    return path


def told(loaded: ctypes.CDLL, names: Iterable[str]) -> dict[str, tuple[object, tuple[object, ...]]]:
    """Function to the result and the arguments that ctypes has for it."""
    functions = {name: getattr(loaded, name) for name in names}
    return {name: (function.restype, tuple(function.argtypes or ())) for name, function in functions.items()}


# --- the interface ---


def test_ctypes_is_told_what_the_header_says() -> None:
    wanted = declared(HEADER)
    assert len(wanted) == HEADER.count("\nMHC_EXPORT ")
    assert told(library.load(), wanted) == wanted


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mhc_probe_add_chain(int64_t steps)", "mhc_probe_add_chain(int32_t steps)"),
        ("struct mhc_rows w, float* dx", "const float* w, float* dx"),
        ("MHC_EXPORT int64_t mhc_probe_multiply_add", "MHC_EXPORT int32_t mhc_probe_multiply_add"),
        ("int64_t tokens, const float* h, float* shifted", "int64_t tokens, const float* h"),
    ],
)
def test_a_planted_change_of_the_header_is_found(old: str, new: str) -> None:
    assert HEADER.count(old) == 1
    changed = declared(HEADER.replace(old, new))
    assert told(library.load(), changed) != changed


def test_the_structs_are_those_of_the_header() -> None:
    names = {ctypes.c_int32: "int32_t", ctypes.c_int64: "int64_t", ctypes.c_void_p: "const void*"}
    for struct, name in ((Call, "mhc_call"), (Rows, "mhc_rows")):
        assert [(field, names[kind]) for field, kind in struct._fields_] == fields(HEADER, name)
    assert (ctypes.sizeof(Call), ctypes.sizeof(Rows)) == (16, 24)


def test_the_numbers_are_those_of_the_header() -> None:
    assert f"#define MHC_ABI_VERSION {ABI_VERSION}\n" in HEADER
    levels = enumerators(HEADER, "mhc_isa")
    assert levels.pop("ISA_COUNT") == len(ISA_LEVELS)
    assert levels == {name.upper(): number for number, name in enumerate(ISA_LEVELS)}


# --- the library that is there ---


def test_the_installed_library_loads_and_runs_here() -> None:
    loaded = library.load()
    assert loaded is library.load()
    levels = library.available_levels(loaded)
    assert levels
    assert library.isa_level(loaded) in levels
    assert loaded.mhc_isa_available(-1) == loaded.mhc_isa_available(len(ISA_LEVELS)) == 0


def test_importing_the_folder_loads_no_library() -> None:
    code = (
        "import sys, rl_engine.mhc.backends.native.library, rl_engine.mhc.backends.native as n; "
        "print('librl_mhc_native' in open('/proc/self/maps').read())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert run.stdout == "False\n"


# --- what is refused ---


def refusal(path: Path | None, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(library, "_path", lambda: path)
    with pytest.raises(NativeBackendUnavailable) as caught:
        library.load.__wrapped__()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_library_that_is_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    monkeypatch.setattr(library, "DISTRIBUTION", "no-such-distribution")
    message = refusal(library._path(), monkeypatch)
    assert library.FILE_NAME in message
    assert "C++20 compiler" in message
    assert "pip install" in message


def test_the_file_beside_the_module_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    beside = tmp_path / library.FILE_NAME
    beside.touch()
    assert library._path() == beside


def test_the_files_of_the_distribution_come_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    installed = site / "rl_engine" / "mhc" / "backends" / "native" / library.FILE_NAME
    information = site / "planted_dist-1.0.dist-info"
    for folder in (installed.parent, information, elsewhere):
        folder.mkdir(parents=True)
    installed.touch()
    information.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: planted-dist\nVersion: 1.0\n")
    information.joinpath("RECORD").write_text(f"{installed.relative_to(site)},,\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(library, "__file__", str(elsewhere / "library.py"))
    monkeypatch.setattr(library, "DISTRIBUTION", "planted-dist")
    assert library._path() == installed


def test_a_file_that_is_no_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "broken.so"
    path.write_bytes(b"no library")
    assert f"{path} cannot be loaded: " in refusal(path, monkeypatch)


def test_another_version_is_refused_with_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiled(tmp_path / "newer.so", f"int mhc_abi_version(void) {{ return {ABI_VERSION + 6}; }}")
    message = refusal(path, monkeypatch)
    assert f"version {ABI_VERSION + 6}, want {ABI_VERSION}" in message


@pytest.mark.parametrize(
    "source", ["int other(void) { return 0; }", f"int mhc_abi_version(void) {{ return {ABI_VERSION}; }}"]
)
def test_a_library_that_lacks_a_function_is_refused(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "undefined symbol: mhc_" in refusal(compiled(tmp_path / "less.so", source), monkeypatch)


# --- RL_MHC_ISA ---


class Processor:
    """Stands in for a library with some levels."""

    def __init__(self, *levels: str) -> None:
        self.levels = levels

    def mhc_isa_available(self, isa: int) -> int:
        return int(ISA_LEVELS[isa] in self.levels)


@pytest.mark.parametrize(
    ("levels", "requested", "want"),
    [
        (("baseline", "avx2", "avx512"), "", "avx512"),
        (("baseline", "avx2"), "", "avx2"),
        (("baseline", "avx2"), "baseline", "baseline"),
        (("neon",), "", "neon"),
    ],
)
def test_the_best_level_or_the_requested_one(
    levels: tuple[str, ...], requested: str, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, requested)
    assert library.isa_level(Processor(*levels)) == want  # type: ignore[arg-type]


@pytest.mark.parametrize("requested", ["avx512", "AVX2", "sse9", "neon"])
def test_another_level_is_refused(requested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, requested)
    message = f"^RL_MHC_ISA: got '{requested}', want one of: baseline, avx2$"
    with pytest.raises(ValueError, match=message):
        library.isa_level(Processor("baseline", "avx2"))  # type: ignore[arg-type]


def test_the_variable_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = Processor("baseline", "avx2")
    monkeypatch.delenv(library.ISA_VARIABLE, raising=False)
    assert library.isa_level(processor) == "avx2"  # type: ignore[arg-type]
    monkeypatch.setenv(library.ISA_VARIABLE, "baseline")
    assert library.isa_level(processor) == "avx2"  # type: ignore[arg-type]
