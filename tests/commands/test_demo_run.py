import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.commands.demo import FOLDER, RECIPES, command, moved_paths, run_demo
from cpt.commands.demo_corpus import write_files
from cpt.errors import ResourceError
from cpt.planning.init_recipe import MOST_HELD_OUT
from cpt.recipe.load import load_recipe

BASE = RECIPES / "demo" / "base.yaml"


def demo(folder, *words, seeds="1,2"):
    """`cpt demo` in a process of its own, in `folder`."""
    environment = {**os.environ, "CPT_CACHE": str(folder / "cache"), "PYTHONPATH": str(RECIPES.parent)}
    arguments = [sys.executable, "-m", "cpt.cli", "demo", "--folder", "demo", "--seeds", seeds, *words]
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


def test_another_folder_moves_every_path_of_the_base_s_recipe():
    text = load_recipe(BASE, moved_paths(Path("elsewhere/deep"))).model_dump_json()
    assert str(FOLDER) not in text
    assert text.count("elsewhere/deep") == load_recipe(BASE).model_dump_json().count(str(FOLDER))


def test_the_base_holds_out_all_that_a_recipe_of_init_holds_out():
    """By the hash of the text, so that a smaller share is a part of a larger one."""
    share = load_recipe(BASE).evaluation.held_out_share
    assert share is not None and share >= MOST_HELD_OUT


@pytest.mark.slow
def test_the_recipe_to_read_goes_on_from_the_demo_s_base_with_the_demo_s_texts(tmp_path):
    recipe, base, texts = load_recipe(RECIPES / "demo.yaml"), load_recipe(BASE), write_files(tmp_path)
    assert recipe.model.path == f"{base.output_dir / base.name}/final"
    (domain, general), (held_out_domain, held_out_general) = recipe.data.sources, recipe.evaluation.perplexity
    named = dict(zip(texts, (domain, held_out_domain, general, held_out_general), strict=True))
    assert {key: str(FOLDER / path.relative_to(tmp_path)) for key, path in texts.items()} == {
        key: one.path for key, one in named.items()
    }


def test_seeds_that_are_no_numbers_are_refused():
    with pytest.raises(typer.BadParameter, match="1,2,3"):
        command(seeds="1 2")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="--folder"):
        run_demo(tmp_path / "file")


@pytest.mark.long
def test_the_whole_demo_at_a_fraction_of_its_size(tmp_path):
    """Texts, base, init, check, two seeds, verdicts, export, the served answer; a second start finds all but the
    answer done."""
    short = ["budget.tokens=20_480", "schedule.warmup_tokens=2_048", "training.logging_steps=5"]
    first = demo(tmp_path, *short)
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert first.returncode == (0 if summary["passed"] else 1), first.stderr[-3000:]
    assert [row["run"] for row in summary["rows"]] == ["code-seed1", "code-seed2"]
    assert all(row["domain_after"] < row["domain_before"] < 4 for row in summary["rows"])
    assert summary["answer"]["prompt"].startswith("def ") and summary["answer"]["text"]
    done = [line.split()[2] for line in first.stdout.splitlines() if line.startswith("$ cpt")]
    assert done == ["tokenizer", "train", "init", "check", "train", "train", "export", "serve"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "demo" / "model")
    written = model.generate(**tokenizer("def f(", return_tensors="pt"), max_new_tokens=4)
    assert tokenizer.decode(written[0], skip_special_tokens=True).startswith("def f(")
    again = demo(tmp_path, *short)
    assert [line.split()[2] for line in again.stdout.splitlines() if line.startswith("$ cpt")] == ["serve"]
    assert again.returncode == first.returncode
