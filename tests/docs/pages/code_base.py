"""A repository out of packages of the standard library; a base; the prose that it has read."""

from pathlib import Path

from guide_texts import modules, write_base, write_general

PORTS = [8000]
PACKAGES = ("asyncio", "email", "http", "json", "logging", "unittest", "urllib")
SUITE = "long"


def prepare(folder: Path) -> None:
    """`project`, `base` and `general`."""
    for package in PACKAGES:
        for path, text in modules(package):
            target = folder / "project" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    write_base(folder / "base")
    write_general(folder / "general")
