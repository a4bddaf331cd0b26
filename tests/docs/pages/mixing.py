"""Manuals, code and prose as folders of text; a base that has read the prose."""

from pathlib import Path

from guide_texts import manuals, modules, write_base, write_general

PACKAGES = ("email", "http", "json", "logging", "urllib")
LONGEST = 40_000


def prepare(folder: Path) -> None:
    """`manuals`, `code`, `prose` and `base`."""
    (folder / "manuals").mkdir()
    for name, passages in manuals(60).items():
        (folder / "manuals" / f"{name}.txt").write_text("\n\n".join(passages), encoding="utf-8")
    (folder / "code").mkdir()
    for package in PACKAGES:
        for path, text in modules(package):
            if len(text) < LONGEST:
                (folder / "code" / f"{'.'.join(path.with_suffix('').parts)}.txt").write_text(text, encoding="utf-8")
    write_general(folder / "prose")
    write_base(folder / "base")
