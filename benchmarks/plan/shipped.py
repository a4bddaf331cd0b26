"""`python -m benchmarks.plan.shipped`: what `cpt plan` prints of the shipped recipes, into docs/planning.md. A
minute."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.marked import with_part

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planning.md"
BEGIN, END = "<!-- python -m benchmarks.plan.shipped: begin -->\n", "<!-- python -m benchmarks.plan.shipped: end -->\n"
SUM, SPEED = re.compile(r"^  sum +([\d.]+)$", re.M), re.compile(r"Speed: ([\d,]+) tokens a second \((\d+%)")


@dataclass(frozen=True)
class Planned:
    """A recipe on a machine."""

    recipe: str
    what: str
    gpu: str
    gpus: int
    options: tuple[str, ...] = ()
    is_shown: bool = False
    """With all that `cpt plan` prints."""

    @property
    def words(self) -> list[str]:
        """The command."""
        return [
            "cpt",
            "plan",
            f"recipes/{self.recipe}.yaml",
            "--gpu",
            self.gpu,
            "--gpus",
            str(self.gpus),
            *self.options,
        ]


HOST_192, HOST_64 = ("--host-memory", "192"), ("--host-memory", "64")
RECIPES = (
    Planned("prototype_rtx4090", "8B, all parameters, ZeRO-3 with all states on the host", "RTX 4090", 1, HOST_192),
    Planned("prototype_rtx4090_64gb", "8B, all parameters, 8-bit moments, released gradients", "RTX 4090", 1, HOST_64),
    Planned("prototype_rtx4090_lora", "8B, LoRA", "RTX 4090", 1, HOST_64),
    Planned("prototype_rtx4090_qlora", "8B, LoRA on 4-bit weights", "RTX 4090", 1, HOST_64),
    Planned("multi_rtx4090", "8B, all parameters", "RTX 4090", 2, HOST_192),
    Planned("multi_rtx4090", "8B, all parameters", "RTX 4090", 4, HOST_192),
    Planned("multi_rtx4090", "8B, all parameters", "RTX 4090", 8, HOST_192),
    Planned("production_multi_gpu", "7B, all parameters, rows of 8,192", "A100-80GB", 4, is_shown=True),
    Planned("production_multi_gpu", "7B, all parameters, rows of 8,192", "A100-80GB", 8),
    Planned("gpt2_124m_6gb", "GPT-2 124M from scratch", "RTX 2060", 1, ("--memory-gib", "6", "--peak-tflops", "51.6")),
)


def main() -> None:
    """Plan them all, and write the part."""
    planned = part([(one, printed(one)) for one in RECIPES])
    PAGE.write_text(with_part(PAGE.read_text(), BEGIN, END, planned, "docs/planning.md"))


def printed(planned: Planned) -> str:
    """What the command says.

    Raises:
        SystemExit: it does not fit, or fails.
    """
    ended = subprocess.run([sys.executable, "-m", *planned.words], cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(planned.words)}: {ended.stdout}{ended.stderr}")
    return ended.stdout


def part(planned: list[tuple[Planned, str]]) -> str:
    """A table of all, and the plans that are shown in full."""
    heads = ["recipe", "what it trains", "on", "each GPU, GiB", "host, GiB", "tokens a second"]
    lines = ["| " + " | ".join(heads) + " |", "| --- | --- | --- | ---: | ---: | ---: |"]
    for one, text in planned:
        on_gpu, on_host = SUM.findall(text)
        speed = SPEED.search(text)
        assert speed is not None, text
        cells = [
            f"`{one.recipe}.yaml`",
            one.what,
            f"{one.gpus} x {one.gpu}",
            on_gpu,
            on_host,
            f"{speed[1]} at {speed[2]}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    shown = (f"\n```\n$ {' '.join(quoted(one.words))}\n{text.strip()}\n```\n" for one, text in planned if one.is_shown)
    return "\n".join(lines) + "\n" + "".join(shown)


def quoted(words: list[str]) -> list[str]:
    """As one types them."""
    return [f'"{word}"' if " " in word else word for word in words]


if __name__ == "__main__":
    main()
