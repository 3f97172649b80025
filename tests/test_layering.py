"""Who may import whom inside ``rl_engine.mhc``, read from the imports themselves.

``LAYERS`` is the one table: a module imports only modules of a strictly lower layer, and the modules of one
folder are free among themselves. Every kind of import counts: at the top, inside a function, under
``TYPE_CHECKING``, relative, and ``importlib.import_module("a.literal.name")``. A name built at run time is
out of sight, which is how ``resolve_provider`` reaches backends without importing them.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = "rl_engine.mhc"
FACADE = "__init__"

# A unit is a module or a folder directly under the package.
LAYERS: Mapping[str, int] = {
    "bits": 0,
    "checks": 0,
    "elementary": 0,
    "float_mode": -1,  # beneath the arithmetic, which refuses to run under a mode that would change it
    "reduction": 0,
    "profiles": 1,
    "tensor_file": 1,
    "contract": 2,
    "trace": 2,
    "operators": 3,
    "capabilities": 3,
    "fixture_inputs": 5,
    "block": 4,
    "oracle": 5,
    "fixtures": 6,
    "provider": 6,
    "acceptance": 7,
    "backends": 7,
    "diagnosis": 8,
    "ops": 8,
    "nn": 9,
    "reports": 9,
    "integrations": 10,
    "parallel": 10,
    FACADE: 11,
    "cli": 11,
    "__main__": 11,
}
# These import whatever they like, and nothing imports them;
# only ``__main__``, which is another door to it, imports ``cli``.
FREE = frozenset({"cli", "__main__"})
# Lower in the table, and still kept apart: a backend must not see what judges it.
APART: Mapping[str, frozenset[str]] = {
    "backends": frozenset({"oracle", "acceptance", "fixtures"}),
    "acceptance": frozenset({"backends"}),
}
OUTSIDE = frozenset({"scripts", "benchmarks", "tests", "examples"})
# Heavy and optional: each belongs to one folder, and importing that folder does not load it.
OPTIONAL: Mapping[str, str] = {
    "triton": f"{PACKAGE}.backends.triton",
    "transformers": f"{PACKAGE}.integrations",
}


@dataclass(frozen=True)
class Import:
    """``import origin`` or ``from origin import member``; ``eager`` if loading the importing module runs it."""

    origin: str
    member: str
    line: int
    eager: bool

    @property
    def names(self) -> tuple[str, str]:
        """What may be loaded: the module, and the member in case that is a module too."""
        return self.origin, f"{self.origin}.{self.member}".rstrip(".")

    @property
    def unit(self) -> str | None:
        """The unit it reaches: the facade for the package's own names, None outside the package."""
        if self.names[1] == PACKAGE:
            return FACADE
        if self.origin == PACKAGE:
            return self.member if self.member in LAYERS else FACADE
        return unit_of(self.origin)


def read_imports(source: str, module: str, is_package: bool = False) -> list[Import]:
    """Every import in ``source``, the text of ``module``."""
    package = module if is_package else module.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, eager: bool) -> None:
        found.extend(Import(origin, member, node.lineno, eager) for origin, member in _imported(node, package))
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for child in node.body:
                visit(child, False)
            for child in node.orelse:
                visit(child, eager)
            return
        inner = eager and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inner)

    visit(ast.parse(source), True)
    return found


def _imported(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        yield from ((origin, alias.name) for alias in node.names)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = ast.unparse(node.func).rpartition(".")[2]
        if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
            yield importlib.util.resolve_name(node.args[0].value, package), ""


def unit_of(module: str) -> str | None:
    """The unit that ``module``, a dotted name, lies in."""
    if module == PACKAGE:
        return FACADE
    if not module.startswith(PACKAGE + "."):
        return None
    return module.removeprefix(PACKAGE + ".").split(".")[0]


def layer_violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What ``module`` imports against the table, one message each."""
    own = unit_of(module)
    assert own is not None, module
    if own not in LAYERS:
        return [f"{module}: a new module: give it a layer in LAYERS of tests/test_layering.py"]
    problems = []
    for item in read_imports(source, module, is_package):
        target, where = item.unit, f"{module}:{item.line}"
        if item.origin.split(".")[0] in OUTSIDE:
            problems.append(f"{where}: imports {item.origin}, which is no part of the package")
        elif target is None or (target == own and own != FACADE):
            continue
        elif target not in LAYERS:
            problems.append(f"{where}: imports {item.origin}, which has no layer")
        elif target in FREE and (own, target) != ("__main__", "cli"):
            problems.append(f"{where}: nothing imports {target}")
        elif target in APART.get(own, ()):
            problems.append(f"{where}: {own} never imports {target}")
        elif own not in FREE and LAYERS[target] >= LAYERS[own]:
            problems.append(f"{where}: {own} (layer {LAYERS[own]}) imports {target} (layer {LAYERS[target]})")
    return problems


def optional_violations(sources: Mapping[str, str]) -> list[str]:
    """Imports of an optional dependency outside its folder, or run by merely loading the folder.

    ``sources`` maps a module's dotted name, with ``.__init__`` on a package, to its text. Inside the folder a
    kernel module may import the dependency at its top (``@triton.jit`` needs it there), as long as the
    folder's ``__init__`` reaches that module, directly or through others, from inside a function only.
    """
    read = {m: read_imports(t, m.removesuffix(".__init__"), m.endswith(".__init__")) for m, t in sources.items()}
    problems = []
    for dependency, home in OPTIONAL.items():
        users = {m for m, found in read.items() if any(_is_in(i.origin, dependency) for i in found)}
        loads = {m for m in users if any(i.eager and _is_in(i.origin, dependency) for i in read[m])}
        while True:
            names = {m.removesuffix(".__init__") for m in loads}
            more = {m for m, found in read.items() if any(i.eager and names & {*i.names} for i in found)}
            if more <= loads:
                break
            loads |= more
        for module in sorted(users | loads):
            if module in users and not _is_in(module, home):
                problems.append(f"{module}: {dependency} is imported in {home} only")
            elif module in loads and (not _is_in(module, home) or module == f"{home}.__init__"):
                problems.append(f"{module}: loading it loads {dependency}; import that inside a function")
    return problems


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def package_sources() -> dict[str, str]:
    """Every module of the package: dotted name (``.__init__`` on a package) to text."""
    root = REPOSITORY.joinpath(*PACKAGE.split("."))
    return {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*.py"))
    }


# --- the package as it is ---


def test_every_module_keeps_to_its_layer() -> None:
    sources = package_sources()
    assert f"{PACKAGE}.contract" in sources
    problems = [
        problem
        for name, text in sources.items()
        for problem in layer_violations(text, name.removesuffix(".__init__"), name.endswith(".__init__"))
    ]
    assert not problems, "\n".join(problems)


def test_optional_dependencies_stay_at_home_and_lazy() -> None:
    problems = optional_violations(package_sources())
    assert not problems, "\n".join(problems)


def test_importing_the_package_loads_nothing_optional() -> None:
    unwanted = ("typer", "rich", "triton", "transformers")
    # torch is loaded first, so that what it may bring along is not laid at the package's door.
    code = (
        "import sys, torch; before = set(sys.modules); import rl_engine.mhc; "
        f"print(sorted(set({unwanted!r}) & (set(sys.modules) - before)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


# --- planted violations, one or more for each rule ---

UPWARD = "contract (layer 2) imports operators (layer 3)"
PLANTED = {
    "import x": ("contract", "import rl_engine.mhc.operators.post", UPWARD),
    "import x as y": ("contract", "import rl_engine.mhc.operators as o", UPWARD),
    "from x import y": ("contract", "from rl_engine.mhc.operators.post import Post", UPWARD),
    "from package import unit": ("contract", "from rl_engine.mhc import operators", UPWARD),
    "relative": ("contract", "from .operators import post", UPWARD),
    "relative, bare": ("contract", "from . import operators", UPWARD),
    "relative, from a folder": (
        "operators.post",
        "from ..block import run",
        "operators (layer 3) imports block (layer 4)",
    ),
    "in a function": ("contract", "def f():\n    from rl_engine.mhc.operators import post", UPWARD),
    "in a method": ("contract", "class A:\n    def f(self):\n        import rl_engine.mhc.operators", UPWARD),
    "for types": ("contract", "if TYPE_CHECKING:\n    from rl_engine.mhc.operators import Post", UPWARD),
    "in a try": ("contract", "try:\n    from .operators import post\nexcept ImportError:\n    pass", UPWARD),
    "importlib": ("contract", "importlib.import_module('rl_engine.mhc.operators')", UPWARD),
    "importlib, bare": ("contract", "m = import_module('rl_engine.mhc.operators.post')", UPWARD),
    "importlib, relative": ("contract", "import_module('.operators', __package__)", UPWARD),
    "__import__": ("contract", "__import__('rl_engine.mhc.operators')", UPWARD),
    "same layer": (
        "contract",
        "from rl_engine.mhc import trace",
        "contract (layer 2) imports trace (layer 2)",
    ),
    "same layer, two names": ("contract", "from rl_engine.mhc import bits, trace", "imports trace (layer 2)"),
    "the facade's name": ("block", "from rl_engine.mhc import ResidualBatch", "imports __init__ (layer 11)"),
    "the facade": ("block", "import rl_engine.mhc", "imports __init__ (layer 11)"),
    "the facade, all": ("block", "from rl_engine.mhc import *", "imports __init__ (layer 11)"),
    "backend sees the oracle": (
        "backends.native",
        "from rl_engine.mhc import oracle",
        "backends never imports oracle",
    ),
    "backend sees the judge": (
        "backends.native",
        "from rl_engine.mhc.acceptance import judge",
        "backends never imports acceptance",
    ),
    "backend sees the fixtures": (
        "backends.triton.post",
        "def f():\n    from ...fixtures import make_batch",
        "backends never imports fixtures",
    ),
    "judge sees a backend": (
        "acceptance.runner",
        "import_module('rl_engine.mhc.backends.native')",
        "acceptance never imports backends",
    ),
    "cli imported": ("reports.text", "from rl_engine.mhc.cli import main", "nothing imports cli"),
    "cli imported by the facade": (FACADE, "from .cli import main", "nothing imports cli"),
    "__main__ imported": ("cli", "import rl_engine.mhc.__main__", "nothing imports __main__"),
    "scripts imported": ("acceptance", "from scripts.check_p1 import x", "no part of the package"),
    "benchmarks imported": ("cli", "import benchmarks", "no part of the package"),
    "unknown module imported": ("cli", "import rl_engine.mhc.helpers", "which has no layer"),
    "mhc from the namespace": ("block", "from rl_engine import mhc", "imports __init__ (layer 11)"),
    "unknown module": ("helpers", "", "give it a layer"),
    "unknown folder": ("misc.helpers", "", "give it a layer"),
}
ALLOWED = {
    "downward": (
        "operators.post",
        "from rl_engine.mhc import checks\nfrom rl_engine.mhc.contract import HC_MULT",
    ),
    "siblings in a folder": (
        "operators.post",
        "from .interface import OperatorSet\nfrom rl_engine.mhc import operators",
    ),
    "downward, relative": ("operators.post", "from ..reduction import fixed_sum"),
    "cli imports anything": (
        "cli",
        "from rl_engine.mhc import backends, __version__\nimport rl_engine.mhc.parallel",
    ),
    "__main__ imports cli": ("__main__", "from rl_engine.mhc.cli import main"),
    "the facade gathers": (FACADE, "from rl_engine.mhc.contract import LayerContract\nfrom . import oracle"),
    "another project": ("bits", "import rl_engine.mhcx, collections.abc\nfrom numpy import operators"),
    "another project's member": ("bits", "from collections.abc import Iterator"),
    "a name in a string": ("provider", "ALIASES = {'native': 'rl_engine.mhc.backends.native:Native'}"),
    "a name at run time": ("provider", "def f(name):\n    return importlib.import_module(name)"),
}


def _check(unit: str, source: str) -> list[str]:
    module = PACKAGE if unit == FACADE else f"{PACKAGE}.{unit}"
    return layer_violations(source, module, is_package=unit == FACADE)


@pytest.mark.parametrize(("unit", "source", "message"), PLANTED.values(), ids=PLANTED)
def test_a_planted_import_is_found(unit: str, source: str, message: str) -> None:
    problems = _check(unit, source)
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize(("unit", "source"), ALLOWED.values(), ids=ALLOWED)
def test_an_allowed_import_passes(unit: str, source: str) -> None:
    assert _check(unit, source) == []


TRITON_HOME = OPTIONAL["triton"]
PLANTED_OPTIONAL = {
    "outside, at the top": {f"{PACKAGE}.operators.post": "import triton"},
    "outside, in a function": {f"{PACKAGE}.operators.post": "def f():\n    import triton.language as tl"},
    "outside, other dependency": {f"{PACKAGE}.nn.block": "from transformers import AutoConfig"},
    "the folder loads it": {f"{TRITON_HOME}.__init__": "import triton"},
    "the folder loads it through a kernel": {
        f"{TRITON_HOME}.__init__": "from .post import kernel",
        f"{TRITON_HOME}.post": "from triton import jit",
    },
    "the folder loads it through two": {
        f"{TRITON_HOME}.__init__": "from . import launch",
        f"{TRITON_HOME}.launch": "from .post import kernel",
        f"{TRITON_HOME}.post": "import triton",
    },
    "another module loads a kernel": {
        f"{PACKAGE}.ops.post": f"from {TRITON_HOME}.post import kernel",
        f"{TRITON_HOME}.post": "import triton",
    },
}
ALLOWED_OPTIONAL = {
    "in a function": {f"{TRITON_HOME}.__init__": "def f():\n    import triton"},
    "for types": {f"{TRITON_HOME}.__init__": "if TYPE_CHECKING:\n    import triton"},
    "a kernel, reached from a function": {
        f"{TRITON_HOME}.__init__": "def f():\n    from .post import kernel",
        f"{TRITON_HOME}.post": "import triton",
    },
}


@pytest.mark.parametrize("sources", PLANTED_OPTIONAL.values(), ids=PLANTED_OPTIONAL)
def test_a_planted_optional_import_is_found(sources: dict[str, str]) -> None:
    assert optional_violations(sources)


@pytest.mark.parametrize("sources", ALLOWED_OPTIONAL.values(), ids=ALLOWED_OPTIONAL)
def test_a_lazy_optional_import_passes(sources: dict[str, str]) -> None:
    assert optional_violations(sources) == []
