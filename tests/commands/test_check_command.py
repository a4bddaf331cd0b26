import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copy

import pytest
from tiny import TINY_LLAMA, write_recipe
from torch.optim import Optimizer
from transformers import AutoConfig, Gemma2ForCausalLM

from cpt.errors import RecipeError
from cpt.models.attention import choose_attention
from cpt.optim.build import find_optimizer
from cpt.plugins import import_named
from cpt.recipe.load import load_recipe


def check(path, *more):
    return subprocess.run([sys.executable, "-m", "cpt.cli", "check", str(path), *more], capture_output=True, text=True)


def test_a_sound_recipe_passes(tiny_recipe, tmp_path):
    checked = check(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_shape_and_sense_answer_before_torch_is_imported(tiny_recipe, tmp_path):
    tiny_recipe["optimiser"] = {"name": "adamw"}
    path = write_recipe(tiny_recipe, tmp_path / "r.yaml")
    code = (
        f"import sys; from cpt.cli import main\ntry: main(['check', {str(path)!r}])\n"
        "except SystemExit as e: assert e.code == 2\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_quick_check_ends_with_shape_and_sense(tiny_recipe, tmp_path):
    path = write_recipe({**tiny_recipe, "model": {"path": "no/such/model"}}, tmp_path / "r.yaml")
    words = ["check", "--quick", str(path)]
    code = f"import sys; from cpt.cli import main\ntry: main({words})\nfinally: assert 'torch' not in sys.modules"
    checked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "Not checked: files, model" in " ".join(checked.stdout.split())
    (tmp_path / "r.yaml").write_text(path.read_text() + "optimiser: {name: adamw}\n")
    assert check(path, "--quick").returncode == 2


def test_four_planted_mistakes_stand_in_one_listing_with_their_lines(tmp_path):
    (tmp_path / "model.yaml").write_text("path: some/model\natention: sdpa\n")
    (tmp_path / "r.yaml").write_text(
        "name: planted\n"
        "model: model.yaml\n"
        "data: {sources: [{path: a.txt}], sequence_lenght: 64}\n"
        "budget: {tokens: 1000}\n"
        "optimizer: {learning_rate: 1e-4}\n"
        "training:\n"
        "  gradient_checkpointin: true\n"
        "  learning_rate: 1e-4\n"
    )
    checked = check(tmp_path / "r.yaml")
    assert checked.returncode == 2
    for line in ("model.yaml:2:", "r.yaml:3:", "r.yaml:7:", "r.yaml:8:"):
        assert line in checked.stderr
    for meant in ("`attention`", "`sequence_length`", "`gradient_checkpointing`", "optimizer.learning_rate"):
        assert meant in checked.stderr


@pytest.mark.slow
def test_what_an_earlier_run_has_to_make_is_a_blocker(tiny_recipe, tmp_path):
    tiny_recipe["model"] = {"path": f"{tiny_recipe['output_dir']}/base/final"}
    tiny_recipe["stage"] = "cpt"
    checked = check(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    assert checked.returncode == 3 and "blocker on this machine" in checked.stdout and "base/final" in checked.stdout


@pytest.mark.slow
def test_a_shape_that_is_not_that_of_the_model_in_the_hub_cache_is_an_error(tiny_recipe, tmp_path):
    snapshot = tmp_path / "home/hub/models--lab--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("abc")
    for file in Path(tiny_recipe["tokenizer"]["path"]).iterdir():
        copy(file, snapshot)
    (snapshot / "config.json").write_text(json.dumps(TINY_LLAMA))
    offline = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}

    def check_shape(**changed):
        model = {"path": "lab/model", "config": {**TINY_LLAMA, **changed}}
        path = write_recipe({**tiny_recipe, "stage": "cpt", "model": model, "tokenizer": {}}, tmp_path / "r.yaml")
        return subprocess.run(
            [sys.executable, "-m", "cpt.cli", "check", str(path)], capture_output=True, text=True, env=offline
        )

    same, other = check_shape(), check_shape(num_hidden_layers=7)
    assert same.returncode == 0, same.stdout
    assert other.returncode == 2 and "num_hidden_layers: 7" in other.stdout


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("base_model: a/b\ndatasets: [{path: c}]\n", "cpt import"),
        ("model_name_or_path: a/b\ndataset: c\n", "cpt import"),
    ],
)
def test_a_config_of_another_tool_is_one_sentence_with_the_command(tmp_path, text, remedy):
    (tmp_path / "other.yaml").write_text(text)
    with pytest.raises(RecipeError) as refused:
        load_recipe(tmp_path / "other.yaml")
    assert remedy in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_an_optimizer_of_an_installed_library_is_named_by_its_class():
    with pytest.raises(RecipeError, match="torch.optim:NAdam"):
        find_optimizer("nadam")
    assert issubclass(import_named("torch.optim:NAdam"), Optimizer)
    with pytest.raises(RecipeError) as refused:
        find_optimizer("nothing_like_it")
    assert "Did you mean" not in str(refused.value)


def test_the_remedy_for_an_attention_that_a_model_lacks_is_one_that_it_has():
    config = AutoConfig.for_model("gemma2")
    for wanted in ("varlen", "sdpa"):
        with pytest.raises(RecipeError, match="`model.attention: auto`"):
            choose_attention(wanted, Gemma2ForCausalLM, config=config, packed=True)
    assert choose_attention("auto", Gemma2ForCausalLM, config=config, packed=True) == "eager"
