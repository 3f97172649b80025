"""The site of the documents: every page is in its navigation, every public name on its API page, every link leads on.

Nothing here needs mkdocs. ``make docs`` builds the site, and fails at a warning.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.site_hooks import JOINING, anchor_of, page_of, relinked, source_of
from tests.test_documents import DOCUMENTS, anchors

REPOSITORY = Path(__file__).resolve().parents[1]
API = REPOSITORY / "docs" / "api"
MODULES = {
    "rl_engine.mhc.ops": "ops",
    "rl_engine.mhc.nn": "nn",
    "rl_engine.mhc.integrations.deepseek_v4": "deepseek_v4",
    "rl_engine.mhc.acceptance": "acceptance",
    "rl_engine.mhc.operators": "operators",
}


def config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(REPOSITORY.joinpath("mkdocs.yml").read_text(encoding="utf-8"))
    return loaded


def pages_of(nav: Any) -> Iterator[str]:
    """The pages that a navigation names, in order."""
    if isinstance(nav, str):
        yield nav
    for entry in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from pages_of(entry)


def navigation_faults(nav: Any, documents: Iterable[str]) -> list[str]:
    """Pages without a document, and documents that are on no page or on several; both as paths in the repository."""
    named = [source_of(page) for page in pages_of(nav)]
    wanted = set(documents)
    return sorted((set(named) ^ wanted) | {name for name in named if named.count(name) > 1})


def directives(text: str) -> list[tuple[str, list[str]]]:
    """What each ``:::`` line of an API page names, and the members that it lists; none stands for all."""
    found = re.finditer(r"^::: (\S+)\n((?:    .*\n)*)", text, re.M)
    return [(match[1], re.findall(r"^        - (\w+)$", match[2], re.M)) for match in found]


def named(text: str) -> list[str]:
    """The first of each pair of ``directives``."""
    return [name for name, _ in directives(text)]


def undocumented(module: str, public: Iterable[str], text: str) -> list[str]:
    """The public names of a module that its API page has no ``:::`` line for."""
    return sorted({f"{module}.{name}" for name in public} - set(named(text)))


def shows(text: str, name: str, home: str | None) -> bool:
    """Whether an API page shows ``name`` of module ``home``: by itself, in a list of members, or with the module."""
    return any(
        found.endswith(f".{name}") or name in members or (found == home and not members)
        for found, members in directives(text)
    )


def resolve(name: str) -> Any:
    """The module or object of a dotted name; ``AttributeError`` or ``ImportError`` where there is none."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[count:], module)
    raise ImportError(name)


# --- the navigation ---


def test_every_document_is_in_the_navigation_once() -> None:
    documents = [str(path.relative_to(REPOSITORY)) for path in DOCUMENTS]
    assert navigation_faults(config()["nav"], documents) == []


def test_a_page_that_is_missing_unlisted_or_listed_twice_is_found() -> None:
    nav = [{"Overview": "index.md"}, {"Group": [{"A": "a.md"}, {"B": "gone.md"}, {"Again": "a.md"}]}]
    assert list(pages_of(nav)) == ["index.md", "a.md", "gone.md", "a.md"]
    assert navigation_faults(nav, ["README.md", "docs/a.md", "docs/new.md"]) == [
        "docs/a.md",
        "docs/gone.md",
        "docs/new.md",
    ]


def test_the_site_asks_nothing_of_the_network() -> None:
    found = config()
    assert found["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript", "extra"} & set(found)
    assert found["strict"] is True


# --- the API pages ---


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_on_the_api_page(module: str) -> None:
    text = API.joinpath(f"{MODULES[module]}.md").read_text(encoding="utf-8")
    assert undocumented(module, importlib.import_module(module).__all__, text) == []


def test_a_name_that_its_page_lacks_is_found() -> None:
    page = "# m\n\n::: m.f\n    options:\n      members: false\n\n`m.g` and ::: m.g are no directives\n"
    assert undocumented("m", ["f", "g"], page) == ["m.g"]
    assert [shows("::: m\n", "f", "m"), shows("::: m.f\n", "f", None), shows("::: m\n", "f", "n")] == [
        True,
        True,
        False,
    ]
    assert not shows("::: m\n    options:\n      members:\n        - g\n", "f", "m")


def test_the_page_of_the_package_says_where_each_of_its_names_is() -> None:
    text = API.joinpath("mhc.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*`) \| \[\w+\]\((\w+\.md)\) \|$", text, re.M)
    found = {name: page for names, page in rows for name in re.findall(r"`(\w+)`", names)}
    package = importlib.import_module("rl_engine.mhc")
    assert sorted(found) == sorted(package.__all__)
    for name, page in found.items():
        home = getattr(getattr(package, name), "__module__", None)
        assert shows(API.joinpath(page).read_text(encoding="utf-8"), name, home), name


@pytest.mark.parametrize("path", sorted(API.glob("*.md")), ids=lambda path: path.stem)
def test_what_an_api_page_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    (title,) = re.findall(r"^# (\S+)$", text, re.M)
    assert named(text)[0] == title
    for name, members in directives(text):
        assert [member for member in members if not hasattr(resolve(name), member)] == []


def test_a_name_that_does_not_exist_is_found() -> None:
    with pytest.raises(AttributeError):
        resolve("rl_engine.mhc.ops.no_such_operation")


# --- links ---


def test_a_link_leads_to_the_page_of_what_it_named() -> None:
    text = "[a](docs/x.md#y) [b](LICENSE) [c](#here) [d](https://x.org/a) `[e](docs/x.md)` [`f`](CONTRIBUTING.md)\n"
    want = "[a](x.md#y) [b](files/LICENSE.md) [c](#here) [d](https://x.org/a) `[e](docs/x.md)` [`f`](contributing.md)\n"
    assert relinked(text, "index.md") == want
    assert (
        relinked("![p](../images/p.png) [r](../../README.md#a)", "design/d.md")
        == "![p](../images/p.png) [r](../index.md#a)"
    )
    fenced = "```text\n[a](docs/x.md)\n```\n"
    assert relinked(fenced, "index.md") == fenced


def test_a_page_and_its_source_name_each_other() -> None:
    for page in (*JOINING, "native_backend.md", "api/nn.md"):
        assert page_of(source_of(page)) == page


def test_headings_have_the_anchors_of_the_repository() -> None:
    heading = "What it is, in `one` line: a/b & c"
    assert anchors(f"# {heading}\n") == {anchor_of(heading, "-")}
