"""Which configs of other tools does `cpt import` translate? `python -m benchmarks.importing FOLDER ...`: a minute.

Each folder is a source distribution, unpacked: all YAML files and shell scripts of its `examples`, and the `swift`
commands of its README. A config either becomes a recipe that passes `cpt check --quick`, or is refused with one
sentence. Anything else is printed, and is an error. Writes benchmarks/results/importing.json.
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from cpt.commands.recipes import translated
from cpt.errors import CptError
from cpt.recipe.load import load_recipe

RESULTS = Path(__file__).parent / "results" / "importing.json"
CODE = re.compile(r"```(?:shell|bash)\n(.*?)```", re.DOTALL)


def main() -> None:
    """Import all configs, and write the counts and the reasons."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.importing", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--verbose", action="store_true", help="also print each config that was refused")
    asked = parser.parse_args()
    rows, failures = [], 0
    for folder in asked.folders:
        with TemporaryDirectory() as scratch:
            outcomes = {path: outcome_of(path, Path(scratch)) for path in configs_in(folder, Path(scratch))}
        counts = Counter(kind for kind, _ in outcomes.values())
        failures += counts["failed"]
        for path, (kind, text) in outcomes.items():
            if kind == "failed" or kind == "refused" and asked.verbose:
                print(f"{kind}: {path}\n    {text}")
        print(f"{folder.name}: {dict(counts)}")
        reasons = Counter(
            text.removeprefix(str(path)).lstrip(":0123456789 ")
            for path, (kind, text) in outcomes.items()
            if kind == "refused"
        )
        rows.append(
            {"source": folder.name, "configs": len(outcomes), **counts, "reasons": dict(reasons.most_common())}
        )
    RESULTS.write_text(json.dumps({"results": rows}, indent=1) + "\n")
    raise SystemExit(failures > 0)


def configs_in(folder: Path, scratch: Path) -> list[Path]:
    files = [path for path in sorted((folder / "examples").rglob("*")) if path.suffix in (".yaml", ".yml", ".sh")]
    for number, code in enumerate(CODE.findall((folder / "README.md").read_text(encoding="utf-8"))):
        if re.search(r"\b(swift|megatron) (pt|sft|rlhf)\b", code):
            script = scratch / f"README-{number}.sh"
            script.write_text(code)
            files.append(script)
    return files


def outcome_of(path: Path, scratch: Path) -> tuple[str, str]:
    """Return `imported`, `refused` or `failed`, and what was printed."""
    recipe = scratch / "recipe.yaml"
    try:
        text = translated(path).text()
    except CptError as refusal:
        return ("refused" if "\n" not in str(refusal) else "failed"), str(refusal)
    except Exception as problem:
        return "failed", f"{type(problem).__name__}: {problem}"
    recipe.write_text(text, encoding="utf-8")
    try:
        load_recipe(recipe)
    except CptError as problem:
        return "failed", str(problem)
    return "imported", ""


if __name__ == "__main__":
    main()
