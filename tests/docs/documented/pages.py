"""Which pages there are, and what a page's own file in tests/docs/pages/ prepares for it."""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
PREPARED_BY = Path(__file__).parents[1] / "pages"
BESIDE_DOCS = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(f"{name}/README.md" for name in ("recipes", "launch", "benchmarks")),
)
COPIED = ("recipes", "launch", "deepspeed_configs", "examples")
"""Folders that a command may write to; the others are links."""
LEFT_AT_HOME = ("runs", "demo_runs", "build", "dist")


@dataclass(frozen=True)
class Preparation:
    """What a page's file says; without one, nothing is prepared."""

    prepare: Callable[[Path], None] = lambda folder: None
    suite: str = "slow"
    """The marker of the suite that runs it; empty for the default one."""
    ports: list[int] = field(default_factory=list)


def pages() -> list[Path]:
    """All that hold commands, relative to the repository."""
    beside = [Path(name) for name in (*BESIDE_DOCS, "deepspeed_configs/README.md")]
    below_docs = [
        path.relative_to(ROOT) for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts
    ]
    return [*beside, *below_docs]


def preparation_name(page: Path) -> str:
    """`docs/guides/mixing.md` -> `mixing`, `docs/reference/recipe.md` -> `reference_recipe`, `recipes/README.md` ->
    `recipes_README`."""
    return "_".join([*(folder for folder in page.parts[:-1] if folder not in ("docs", "guides")), page.stem])


def preparation_of(page: Path, among: Path = PREPARED_BY) -> Preparation:
    """What is said about the page.

    Raises:
        ValueError: its file says something that is not known.
    """
    file = among / f"{preparation_name(page)}.py"
    if not file.exists():
        return Preparation()
    spec = importlib.util.spec_from_file_location(f"documented_page_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    said = vars(module)
    if unknown := {name for name in said if name.isupper() and len(name) > 1} & {"SLOW", "PORT", "NEEDS", "QUICK"}:
        raise ValueError(f"{file.name}: {', '.join(unknown)} says nothing; FAST, SUITE and PORTS do")
    return Preparation(
        said.get("prepare", lambda folder: None),
        "" if said.get("FAST", False) else str(said.get("SUITE", "slow")),
        list(said.get("PORTS", [])),
    )


def make_folder(folder: Path, root: Path = ROOT) -> None:
    """A folder to run a page in: copies of what commands may write to, links to the rest of the repository."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(root.iterdir()):
        if path.name in COPIED:
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.name not in LEFT_AT_HOME and not path.name.startswith(".") and not path.name.endswith(".egg-info"):
            (folder / path.name).symlink_to(path)
