"""The site that `make docs` builds: strict in all that leads nowhere, and the repository's own pages pass."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOUND = {
    "docs/_toc.yml": (
        "root: docs/index\nsubtrees:\n  - entries:\n      - file: docs/page\n      - file: recipes/README\n"
    ),
    "docs/index.md": (
        "# Start\n\n[a page](page.md), [its heading](page.md#the-second-heading),"
        " [recipes](../recipes/README.md#one).\n"
    ),
    "docs/page.md": (
        "# A page\n\n## The second heading\n\n[back](index.md), [here](#the-second-heading), [a"
        " file](../recipes/demo.yaml).\n"
    ),
    "recipes/README.md": "# Recipes\n\n## One\n\n[the page](../docs/page.md)\n",
    "recipes/demo.yaml": "name: demo\n",
}
PLANTED = {
    "a link to no page": ("docs/page.md", "[gone](gone.md)", "cross-reference target not found: 'gone.md'"),
    "a link to no heading of a page": (
        "docs/index.md",
        "[gone](page.md#the-third-heading)",
        "local id not found in doc 'docs/page'",
    ),
    "a link to no heading of its own page": (
        "docs/index.md",
        "[gone](#no-such-heading)",
        "target not found: 'no-such-heading'",
    ),
    "a link to no file": (
        "docs/page.md",
        "[gone](../recipes/gone.yaml)",
        "cross-reference target not found: '../recipes/gone.yaml'",
    ),
    "a link to a folder": ("docs/page.md", "[a folder](../recipes)", "cross-reference target not found: '../recipes'"),
    "a heading of a file outside of docs/": (
        "docs/page.md",
        "[gone](../recipes/README.md#two)",
        "local id not found in doc 'recipes/README'",
    ),
    "no picture": ("docs/page.md", "![gone](pictures/gone.png)", "image file not readable: docs/pictures/gone.png"),
    "a page that no table of contents names": ("docs/alone.md", "# Alone", "document isn't included in any toctree"),
}


def write(root: Path, pages: dict[str, str]) -> None:
    for name, text in pages.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    shutil.copy(ROOT / "docs" / "conf.py", root / "docs")


def build(root: Path, folder: Path, builder: str = "dummy") -> subprocess.CompletedProcess[str]:
    """As `make docs`, without writing pages unless asked."""
    words = [
        "-c",
        "docs",
        "--fail-on-warning",
        "--keep-going",
        "--quiet",
        "-b",
        builder,
        "-d",
        str(folder / "doctrees"),
    ]
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *words, ".", str(folder / "site")], cwd=root, capture_output=True, text=True
    )


def test_pages_whose_links_lead_somewhere_are_built_with_the_files_they_name(tmp_path):
    write(tmp_path, SOUND)
    (tmp_path / "docs" / "site").mkdir()
    built = build(tmp_path, tmp_path / "build", "html")
    assert built.returncode == 0, built.stderr
    assert 'href="../recipes/README.html#one"' in (tmp_path / "build" / "site" / "docs" / "index.html").read_text()
    assert len(list((tmp_path / "build" / "site" / "_downloads").rglob("demo.yaml"))) == 1


def test_what_leads_nowhere_fails_the_build_and_is_named(tmp_path):
    pages = dict(SOUND)
    for page, text, _ in PLANTED.values():
        pages[page] = f"{pages.get(page, '')}\n{text}\n"
    write(tmp_path, pages)
    built = build(tmp_path, tmp_path / "build")
    assert built.returncode == 1
    assert [what for what, (_, _, complaint) in PLANTED.items() if complaint not in built.stderr] == [], built.stderr


def test_the_sidebar_names_every_page_once():
    """The build says the same, in half a minute."""
    listed = re.findall(r"file: (\S+)", (ROOT / "docs" / "_toc.yml").read_text())
    assert sorted(listed) == sorted(set(listed))
    pages = [
        path
        for path in (ROOT / "docs").rglob("*")
        if path.suffix in (".md", ".ipynb") and "checkpoints" not in path.parent.name
    ]
    below_docs = {str(path.relative_to(ROOT).with_suffix("")) for path in pages}
    assert below_docs - {"docs/index"} == {page for page in listed if page.startswith("docs/")}
    assert [page for page in listed if not page.startswith("docs/") and not (ROOT / f"{page}.md").exists()] == []


def test_no_page_has_a_gap_that_was_to_be_filled():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert [path.name for path in pages if re.search(r"@@|TODO|FIXME|XXX", path.read_text())] == []


@pytest.mark.slow
def test_the_documentation_of_the_repository_is_built(tmp_path):
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
