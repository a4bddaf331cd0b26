"""`python -m benchmarks.plan.shipped [RECIPE ...]`: the plans of the shipped recipes, or of some, by the `cpt plan`
commands in their headers.

Writes the line `# Planned:` below each command, and all of these lines into the table of recipes/README.md. The exit
code is 1 if there were other numbers. Needs no network: its Hub cache has the config of each model in recipes/models.
"""

import io
import json
import os
import re
import shlex
import sys
import tempfile
from contextlib import redirect_stdout, suppress
from pathlib import Path

import yaml

from benchmarks.readme import table, write_part

ROOT = Path(__file__).parents[2]
RECIPES, PAGE = ROOT / "recipes", ROOT / "recipes/README.md"
PARTS = ("models", "mixtures", "presets", "pipelines", "search")
COMMAND = re.compile(r"^(#   cpt (plan .*)\n# Planned:)(.*)$", re.M)
SUM, GPUS = re.compile(r"^  sum +([\d.]+)$", re.M), re.compile(r"; (\d+ x [^;\n]+)\.$", re.M)
SPEED = re.compile(r"Speed: ([\d,]+) tokens/s \(.*?\)(?:: ([\d.]+ \w+) for)?")
HEADS = ["recipe", "for", "planned"]


def main() -> None:
    os.chdir(ROOT)
    whole = [
        path for path in RECIPES.rglob("*.yaml") if path.relative_to(RECIPES).parts[0] not in PARTS
    ]
    before = {path: path.read_text(encoding="utf-8") for path in (PAGE, *whole)}
    with tempfile.TemporaryDirectory() as cache:
        cache_configs(Path(cache))
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": cache}
        for path in [Path(name).absolute() for name in sys.argv[1:]] or whole:
            path.write_text(
                COMMAND.sub(lambda found: f"{found[1]} {plan(found[2])}", before[path]),
                encoding="utf-8",
            )
    rows = []
    for path in sorted(whole, key=lambda path: (len(path.parts), path)):
        text = path.read_text(encoding="utf-8")
        plans = [found[3].strip() for found in COMMAND.finditer(text)] or ["a CPU"]
        rows.append(
            [
                f"`{path.relative_to(RECIPES)}`",
                text.partition("\n")[0].strip("# ."),
                "<br>".join(plans),
            ]
        )
    write_part("benchmarks.plan.shipped", table(HEADS, rows), PAGE)
    changed = [
        str(path.relative_to(ROOT))
        for path, text in before.items()
        if path.read_text("utf-8") != text
    ]
    sys.exit("\n".join(["These had other numbers:", *changed]) if changed else 0)


def plan(command: str) -> str:
    """The GPUs, GiB on each and on the host, tokens a second, the time for the budget, and whether it fits."""
    from cpt.cli import main as cpt  # huggingface_hub reads the environment when it is imported

    with redirect_stdout(io.StringIO()) as output, suppress(SystemExit):
        cpt(shlex.split(command))
    printed = output.getvalue()
    gpus, sums, speed = GPUS.search(printed), SUM.findall(printed), SPEED.search(printed)
    assert gpus is not None and speed is not None, f"cpt {command}: {printed}"
    on_gpu, on_host = (f"{float(size):.1f}" for size in sums)
    fits = "" if "Verdict: it fits" in printed else "does not fit "
    time = f", {speed[2]}" if speed[2] else ""
    return f"{fits}{gpus[1]}: {on_gpu} GiB on each, {on_host} GiB on the host, {speed[1]} tokens/s{time}"


def cache_configs(cache: Path) -> None:
    for file in (RECIPES / "models").rglob("*.yaml"):
        model, commit = yaml.safe_load(file.read_text(encoding="utf-8")), "0" * 40
        if "path" in model:
            repository = cache / f"models--{model['path'].replace('/', '--')}"
            files = {
                f"snapshots/{commit}/config.json": json.dumps(model["config"]),
                "refs/main": commit,
            }
            for place, text in files.items():
                (repository / place).parent.mkdir(parents=True)
                (repository / place).write_text(text)


if __name__ == "__main__":
    main()
