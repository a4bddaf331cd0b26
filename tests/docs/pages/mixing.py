"""Manuals, code and prose as folders of text; a base that has read the prose."""

from pathlib import Path

from guide_texts import manuals, modules, write_base, write_general


def prepare(folder: Path) -> None:
    """`manuals`, `code`, `prose` and `base`."""
    (folder / "manuals").mkdir()
    for name, passages in manuals(60).items():
        (folder / "manuals" / f"{name}.txt").write_text("\n\n".join(passages), encoding="utf-8")
    (folder / "code").mkdir()
    for path, text in modules("email"):
        (folder / "code" / f"{path.stem}.txt").write_text(text, encoding="utf-8")
    write_general(folder / "prose")
    write_base(folder / "base")
