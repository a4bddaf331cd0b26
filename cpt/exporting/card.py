"""What the model card of a quantised or converted export says beyond that of the whole model."""

from collections.abc import Sequence
from pathlib import Path

from cpt.files import write_atomic

CARD = "README.md"


def add_section(folder: Path, title: str, lines: Sequence[str]) -> None:
    """Put a section in front of the limits, or at the end of a card that has none."""
    card = (folder / CARD).read_text(encoding="utf-8")
    section = f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines) + "\n\n"
    before, found, after = card.partition("## Limits\n")
    write_atomic(
        folder / CARD,
        f"{before}{section}{found}{after}" if found else f"{card.rstrip()}\n\n{section.rstrip()}\n",
        reuse_space=True,
    )


def replace_serving(folder: Path, commands: Sequence[str]) -> None:
    """The last section, for an export that is served by other programs."""
    card = (folder / CARD).read_text(encoding="utf-8")
    before, _, _ = card.partition("## Serve\n")
    write_atomic(folder / CARD, before + "## Serve\n\n```bash\n" + "\n".join(commands) + "\n```\n", reuse_space=True)
