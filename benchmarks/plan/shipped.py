"""`python -m benchmarks.plan.shipped`: the plans of the shipped recipes, in benchmarks/README.md."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.readme import table, write_part

ROOT = Path(__file__).parents[2]
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


def main() -> None:
    rows = []
    for words, what in RECIPES.items():
        name, *options = shlex.split(words)
        command = [sys.executable, "-m", "cpt", "plan", f"recipes/{name}.yaml", *options]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"{words}: {ended.stdout}{ended.stderr}")
        speed = SPEED.search(ended.stdout)
        assert speed is not None, ended.stdout
        on = f"{options[3]} x {options[1]}"
        rows.append([f"`{name}.yaml`", what, on, *SUM.findall(ended.stdout), f"{speed[1]} at {speed[2]}"])
    heads = ["recipe", "what it trains", "on", "each GPU, GiB", "host, GiB", "tokens a second"]
    write_part("benchmarks.plan.shipped", table(heads, rows))


if __name__ == "__main__":
    main()
