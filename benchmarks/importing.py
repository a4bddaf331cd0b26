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
from typing import Any

from benchmarks.readme import table, write_part
from cpt.contrib.importers.command import translated
from cpt.errors import CptError
from cpt.recipe.load import load_recipe

RESULTS = Path(__file__).parent / "results" / "importing.json"
CODE = re.compile(r"```(?:shell|bash)\n(.*?)```", re.DOTALL)


def main() -> None:
    """Import all configs, and write the counts and the reasons."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.importing", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    rows = [import_all(folder.resolve()) for folder in parser.parse_args().folders]
    RESULTS.write_text(json.dumps({"results": rows}, indent=1) + "\n")
    heads = ("source", "configs", "imported", "refused", "failed")
    write_part(
        "benchmarks.importing", table(heads, [[str(row[head]) for head in heads] for row in rows])
    )
    raise SystemExit(any(row["failed"] for row in rows))


def import_all(folder: Path) -> dict[str, Any]:
    """Return the counts of a source distribution, and how often each reason was given; print what failed."""
    counts, reasons = Counter(imported=0, refused=0, failed=0), Counter()
    with TemporaryDirectory() as scratch:
        for path in configs_in(folder, Path(scratch)):
            kind, text = outcome_of(path, Path(scratch))
            counts[kind] += 1
            if kind == "refused":
                place = re.compile(rf"^{re.escape(str(path))}[\d: ]*")
                reasons[place.sub("", text).replace(f"{folder}/", "")] += 1
            elif kind == "failed":
                print(f"{path}: {text}")
    print(f"{folder.name}: {dict(counts)}")
    return {
        "source": folder.name,
        "configs": counts.total(),
        **counts,
        "reasons": dict(reasons.most_common()),
    }


def configs_in(folder: Path, scratch: Path) -> list[Path]:
    files = [
        path
        for path in sorted((folder / "examples").rglob("*"))
        if path.suffix in (".yaml", ".yml", ".sh")
    ]
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
