"""`python -m benchmarks.plan.shipped`: what `cpt plan` prints of the shipped recipes, into docs/planning.md."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.marked import table, with_part

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planning.md"
BEGIN, END = "<!-- python -m benchmarks.plan.shipped: begin -->\n", "<!-- python -m benchmarks.plan.shipped: end -->\n"
SUM, SPEED = re.compile(r"^  sum +([\d.]+)$", re.M), re.compile(r"Speed: ([\d,]+) tokens/s \((\d+%)")
RECIPES = {  # name of the recipe and options of `cpt plan` -> what it trains
    "prototype_rtx4090 --gpu 'RTX 4090' --gpus 1 --host-memory 192": "8B, ZeRO-3 with all states on the host",
    "prototype_rtx4090_64gb --gpu 'RTX 4090' --gpus 1 --host-memory 64": "8B, 8-bit moments, released gradients",
    "prototype_rtx4090_lora --gpu 'RTX 4090' --gpus 1 --host-memory 64": "8B, LoRA",
    "prototype_rtx4090_qlora --gpu 'RTX 4090' --gpus 1 --host-memory 64": "8B, LoRA on 4-bit weights",
    "multi_rtx4090 --gpu 'RTX 4090' --gpus 2 --host-memory 192": "8B, all parameters",
    "multi_rtx4090 --gpu 'RTX 4090' --gpus 4 --host-memory 192": "8B, all parameters",
    "multi_rtx4090 --gpu 'RTX 4090' --gpus 8 --host-memory 192": "8B, all parameters",
    "production_multi_gpu --gpu A100-80GB --gpus 4": "7B, all parameters, rows of 8,192",
    "production_multi_gpu --gpu A100-80GB --gpus 8": "7B, all parameters, rows of 8,192",
    "gpt2_124m_6gb --gpu 'RTX 2060' --gpus 1 --memory-gib 6 --peak-tflops 51.6": "GPT-2 124M from scratch",
}
SHOWN = (1, 3, 7)  # with all that `cpt plan` prints


def main() -> None:
    """Plan them all, and write the part."""
    rows, shown = [], ""
    for number, (words, what) in enumerate(RECIPES.items()):
        name, *options = shlex.split(words)
        command = ["cpt", "plan", f"recipes/{name}.yaml", *options]
        ended = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"{words}: {ended.stdout}{ended.stderr}")
        speed = SPEED.search(ended.stdout)
        assert speed is not None, ended.stdout
        on = f"{options[3]} x {options[1]}"
        rows.append([f"`{name}.yaml`", what, on, *SUM.findall(ended.stdout), f"{speed[1]} at {speed[2]}"])
        if number in SHOWN:
            shown += f"\n```\n$ {shlex.join(command).replace(chr(39), chr(34))}\n{ended.stdout.strip()}\n```\n"
    heads = ["recipe", "what it trains", "on", "each GPU, GiB", "host, GiB", "tokens a second"]
    PAGE.write_text(with_part(PAGE.read_text(), BEGIN, END, table(heads, rows) + shown, "docs/planning.md"))


if __name__ == "__main__":
    main()
