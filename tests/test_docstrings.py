"""Every public module, class, function and method of ``rl_engine.mhc`` has a docstring of its own.

Read from the source, so an inherited docstring does not count: a method that fulfils a protocol says what it does
itself. ``pytest -rP tests/test_docstrings.py`` shows the coverage.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "rl_engine" / "mhc"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(source: str, module: str) -> dict[str, bool]:
    """Dotted name of each public thing in ``source``, the text of ``module``: whether it has a docstring."""
    tree = ast.parse(source)
    found = {module: _has_docstring(tree)}
    for name, node in _public_definitions(tree, module):
        # One name may be defined in both branches of an ``if``; each definition has to have its own.
        found[name] = found.get(name, True) and _has_docstring(node)
    return found


def _has_docstring(node: ast.Module | Definition) -> bool:
    return bool((ast.get_docstring(node) or "").strip())


def _public_definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition):
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                yield from _public_definitions(child, prefix)
            continue
        if child.name.startswith("_") or _is_repetition(child):
            continue
        name = f"{prefix}.{child.name}"
        yield name, child
        if isinstance(child, ast.ClassDef):  # what a function defines inside is its own affair
            yield from _public_definitions(child, name)


def _is_repetition(node: Definition) -> bool:
    """An overload or a property's setter or deleter: documented where the name is first or finally defined."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(d in {"overload", "typing.overload", f"{node.name}.setter", f"{node.name}.deleter"} for d in decorators)


def test_everything_public_has_a_docstring() -> None:
    found: dict[str, bool] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        found |= documented(path.read_text(encoding="utf-8"), module)
    missing = [name for name, has in found.items() if not has]
    coverage = f"docstrings: {len(found) - len(missing)} of {len(found)} public names"
    print(coverage)
    assert len(found) > 1
    assert not missing, "\n  ".join([coverage, *missing])


BARE = {
    "module": ("x = 1", ["m"]),
    "empty module docstring": ('"""  """', ["m"]),
    "function": ('"""M."""\ndef f(): ...', ["m.f"]),
    "async function": ('"""M."""\nasync def f(): ...', ["m.f"]),
    "class": ('"""M."""\nclass A: ...', ["m.A"]),
    "dataclass": ('"""M."""\n@dataclass(frozen=True)\nclass A:\n    x: int', ["m.A"]),
    "method": ('"""M."""\nclass A:\n    """A."""\n    def f(self): ...', ["m.A.f"]),
    "method of a subclass": (
        '"""M."""\nclass P(Protocol):\n    """P."""\n    def f(self):\n        """F."""\n'
        'class A(P):\n    """A."""\n    def f(self): ...',
        ["m.A.f"],
    ),
    "property": ('"""M."""\nclass A:\n    """A."""\n    @property\n    def f(self): ...', ["m.A.f"]),
    "nested class": ('"""M."""\nclass A:\n    """A."""\n    class B: ...', ["m.A.B"]),
    "under if and try": (
        '"""M."""\nif x:\n    def f(): ...\nelse:\n    def g(): ...\ntry:\n    pass\nexcept E:\n    def h(): ...',
        ["m.f", "m.g", "m.h"],
    ),
    "one branch of two": ('"""M."""\nif x:\n    def f():\n        """F."""\nelse:\n    def f(): ...', ["m.f"]),
    "docstring after a statement": ('"""M."""\ndef f():\n    x = 1\n    """F."""', ["m.f"]),
}
FULL = {
    "private names": '"""M."""\ndef _f(): ...\nclass _A:\n    def f(self): ...',
    "special methods": '"""M."""\nclass A:\n    """A."""\n    def __init__(self): ...\n    def __len__(self): ...',
    "inner functions": '"""M."""\ndef f():\n    """F."""\n    def g(): ...\n    return g',
    "overloads": (
        '"""M."""\n@overload\ndef f(x: int): ...\n@typing.overload\ndef f(x: str): ...\ndef f(x):\n    """F."""'
    ),
    "setters": (
        '"""M."""\nclass A:\n    """A."""\n    @property\n    def x(self):\n        """X."""\n'
        "    @x.setter\n    def x(self, v): ...\n    @x.deleter\n    def x(self): ..."
    ),
}


@pytest.mark.parametrize(("source", "missing"), BARE.values(), ids=BARE)
def test_a_missing_docstring_is_found(source: str, missing: list[str]) -> None:
    assert [name for name, has in documented(source, "m").items() if not has] == missing


@pytest.mark.parametrize("source", FULL.values(), ids=FULL)
def test_what_needs_none_is_left_alone(source: str) -> None:
    assert all(documented(source, "m").values())
