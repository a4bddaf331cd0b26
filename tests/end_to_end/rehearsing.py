"""Rehearse recipes as users do, in processes of their own, and read what is printed."""

import json
import subprocess
import sys

from launching import ROOT, environment_of_a_run
from tiny import write_documents, write_recipe


def judged_recipe(sections, folder, **changes):
    """A recipe that is evaluated and saved on its way."""
    write_documents(folder / "judged.jsonl", 40, seed=9)
    evaluation = {
        "perplexity": [{"path": str(folder / "judged.jsonl"), "name": "judged"}],
        "every_steps": 4,
        "prompts": ["the model"],
    }
    sections = {**sections, "evaluation": evaluation, "checkpoints": {"every_steps": 2, "keep": 2}, **changes}
    return write_recipe(sections, folder / "recipe.yaml")


def rehearse(recipe, *words):
    """`cpt rehearse` to its end."""
    command = [sys.executable, "-m", "cpt.cli", "rehearse", str(recipe), *words]
    return subprocess.run(command, cwd=ROOT, env=environment_of_a_run(), capture_output=True, text=True, timeout=540)


def findings_of(recipe, *words):
    """Step -> its row; and the exit code."""
    ended = rehearse(recipe, "--json", *words)
    assert ended.stdout, ended.stderr
    return {finding["step"]: finding for finding in json.loads(ended.stdout)["findings"]}, ended.returncode
