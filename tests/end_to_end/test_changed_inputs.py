"""A run whose base changes between two starts stops before its first step; a damaged export is written again."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from launching import losses
from tiny import write_documents, write_recipe
from tiny_run import DAMAGES, damage
from transformers import TrainerCallback

from cpt.errors import CheckpointError, Interrupted
from cpt.files import sealed, signature_of, unsealed
from cpt.recipe.load import load_recipe
from cpt.runs.events import read_events
from cpt.train import train

pytestmark = pytest.mark.heavy
COMMITS = ("1" * 40, "2" * 40)


class InterruptAfter(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def interrupt(file):
    with pytest.raises(Interrupted):
        train(load_recipe(file), ready=lambda trainer: trainer.add_callback(InterruptAfter()))


@pytest.fixture
def hub(tmp_path, base_folder, monkeypatch):
    """A cache of the Hub with two commits of `lab/tiny`; `main` is the first."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub/models--lab--tiny"
    for commit in COMMITS:
        shutil.copytree(base_folder, repository / "snapshots" / commit)
    damage(repository / "snapshots" / COMMITS[1] / "model.safetensors", "bit flip")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMITS[0])
    return repository


@pytest.fixture
def lora(tiny_recipe, tmp_path, base_folder):
    """The recipe of a LoRA run, and its base."""
    base = shutil.copytree(base_folder, tmp_path / "base")
    tiny_recipe["model"] = {"path": str(base), "lora": {"r": 2}}
    return tiny_recipe, base


def test_a_lora_run_whose_base_changed_stops_and_continues_with_the_restored_one(lora, tmp_path):
    sections, base = lora
    file = write_recipe(sections, tmp_path / "r.yaml")
    interrupt(file)
    shutil.copytree(base, tmp_path / "kept")
    weights = base / "model.safetensors"
    damage(weights, "bit flip")
    with pytest.raises(CheckpointError, match=r"model\.safetensors differs"):
        train(load_recipe(file))
    description = load_recipe(file, ["description=x"])
    (tmp_path / "runs/tiny/inputs.json").unlink()  # the checkpoint has a copy
    with pytest.raises(CheckpointError, match=r"model\.safetensors differs"):
        train(description)
    shutil.copy(tmp_path / "kept/model.safetensors", weights)
    train(description)
    assert len(losses(tmp_path / "runs/tiny")) == 8


def test_verify_deep_finds_what_changed_without_a_write(
    tiny_recipe, tmp_path, tokenizer_folder, cpt
):
    tokenizer = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    tiny_recipe["tokenizer"]["path"] = str(tokenizer)
    run = train(load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))).parent
    assert cpt("verify", run, "--deep")[0] == 0
    damage(tokenizer / "tokenizer.json", "bit flip")
    known = run / ".input_hashes.json"
    content = unsealed(known.read_bytes())
    for place, (digest, *_) in content.items():  # as if no time had changed
        content[place] = [digest, *signature_of(Path(place))]
    known.write_text(sealed(content))
    assert cpt("verify", run)[0] == 0
    code, output = cpt("verify", run, "--deep")
    assert code == 2 and "tokenizer.json differs" in output


def test_a_run_from_the_hub_resumes_from_the_commit_that_it_began_with(hub, tiny_recipe, tmp_path):
    tiny_recipe["model"] = {"path": "lab/tiny", "lora": {"r": 2}}
    file = write_recipe(tiny_recipe, tmp_path / "r.yaml")
    train(load_recipe(file, ["name=straight"]))
    interrupt(file)
    (hub / "refs/main").write_text(COMMITS[1])
    train(load_recipe(file))
    straight, resumed = (tmp_path / "runs" / name for name in ("straight", "tiny"))
    assert losses(resumed) == losses(straight)
    name = "final/model.safetensors"
    assert (resumed / name).read_bytes() == (straight / name).read_bytes()
    inputs = json.loads((resumed / "inputs.json").read_text())
    assert inputs["weights"]["revision"] == COMMITS[0]


@pytest.mark.slow
def test_a_damaged_export_is_written_again_from_the_last_checkpoint(tiny_recipe, tmp_path):
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    final = train(recipe)
    names = [path.name for path in final.iterdir() if path.suffix != ".md"]
    whole = {name: (final / name).read_bytes() for name in names}
    for name, how in [
        *(("model.safetensors", how) for how in DAMAGES),
        ("config.json", "empty"),
        ("tokenizer.json", "missing"),
        ("manifest.json", "bit flip"),
    ]:
        damage(final / name, how)
        assert train(recipe) == final
        again = {name: (final / name).read_bytes() for name in names}
        assert {name for name in whole if whole[name] != again[name]} <= {"manifest.json"}
    kinds = [event["kind"] for event in read_events(final.parent)]
    assert kinds == ["quarantined"] * (len(DAMAGES) + 3)


def test_without_a_checkpoint_a_damaged_export_is_an_error_and_nothing_is_trained(
    tiny_recipe, tmp_path
):
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    final = train(recipe)
    for checkpoint in final.parent.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    assert train(recipe) == final
    (final / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing.*--new"):
        train(recipe)


def test_other_documents_in_a_held_out_set_stop_a_run(tiny_recipe, tmp_path):
    held_out = write_documents(tmp_path / "held_out.jsonl", 8, seed=2)
    tiny_recipe["evaluation"] = {"perplexity": [{"path": str(held_out)}]}
    file = write_recipe(tiny_recipe, tmp_path / "r.yaml")
    interrupt(file)
    write_documents(held_out, 8, seed=3)
    with pytest.raises(CheckpointError, match="held-out set `held_out`"):
        train(load_recipe(file, ["description=x"]))
    write_documents(held_out, 8, seed=2)
    train(load_recipe(file))
