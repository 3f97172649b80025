"""A site of the documents, which are written to be read in the repository: the hooks that ``mkdocs.yml`` names.

The README is the front page, the documents beside it join. Where a link leads to another file of the repository, a page
shows that file. Headings get the anchors that they have in the repository. Importing this does not need mkdocs.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[1]
JOINING = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Page of the site to the document outside ``docs/`` that it shows."""

LANGUAGES = {".py": "python", ".h": "cpp"}

# Code comes first, so that what looks like a link in it is left alone. So are targets on the web and on the same page.
LINK = re.compile(
    r"^( *)```.*?^\1```$|(`+)(?!`).+?(?<!`)\2(?!`)|(?<=\]\()(?P<path>(?!https://)[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))",
    re.M | re.S,
)


def source_of(page: str) -> str:
    """Path in the repository of a page of the site."""
    return JOINING.get(page, f"docs/{page}")


def page_of(path: str) -> str:
    """Page of the site that shows a file of the repository, or the file itself where it lies in ``docs/``."""
    joining = {source: page for page, source in JOINING.items()}
    if path in joining:
        return joining[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}.md"


def linked(markdown: str, page: str) -> Iterator[str]:
    """The paths in the repository that the links of a page lead to."""
    for match in LINK.finditer(markdown):
        if match["path"]:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(source_of(page)), match["path"]))


def relinked(markdown: str, page: str) -> str:
    """The text of a page with its links as they are in the site."""

    def place(match: re.Match[str]) -> str:
        if not match["path"]:
            return match[0]
        (path,) = linked(f"]({match['path']})", page)
        return posixpath.relpath(page_of(path), posixpath.dirname(page) or ".") + (match["anchor"] or "")

    return LINK.sub(place, markdown)


def anchor_of(heading: str, separator: str) -> str:
    """The anchor that a heading has in the repository: lower case, no punctuation, each blank a separator."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


# --- called by mkdocs ---


def on_config(config: MkDocsConfig) -> None:
    """The anchors of headings."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor_of


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The documents outside ``docs/``, and a page for each file that a link leads to."""
    from mkdocs.structure.files import File, InclusionLevel

    for page, source in JOINING.items():
        files.append(File.generated(config, page, abs_src_path=str(REPOSITORY / source)))
    pages: list[File] = list(files.documentation_pages())
    paths = {path for page in pages for path in linked(page.content_string, page.src_uri)}
    for path in sorted(path for path in paths if page_of(path).startswith("files/") and (REPOSITORY / path).is_file()):
        text = (REPOSITORY / path).read_text(encoding="utf-8")
        shown = f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}````\n"
        files.append(File.generated(config, page_of(path), content=shown, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The links of a page."""
    return markdown if page.file.src_uri.startswith("files/") else relinked(markdown, page.file.src_uri)
