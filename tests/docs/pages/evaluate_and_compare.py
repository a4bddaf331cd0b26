"""Manuals and prose as folders of text; a base that has read the prose."""

from pathlib import Path

from guide_texts import manuals, write_base, write_general

SUITE = "long"


def prepare(folder: Path) -> None:
    """`manuals`, `prose` and `base`."""
    (folder / "manuals").mkdir()
    for name, passages in manuals(120).items():
        (folder / "manuals" / f"{name}.txt").write_text("\n\n".join(passages), encoding="utf-8")
    write_general(folder / "prose")
    write_base(folder / "base")
