"""The folder of an export: whole or not at all, and what a run adds to it; the mean of checkpoints."""

import errno
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import write_recipe
from tiny_checkpoints import random_llama, save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from cpt.checkpoints.manifest import Manifest, write_manifest
from cpt.checkpoints.model_folder import Tensors
from cpt.errors import CheckpointError
from cpt.export.export import (
    export_average,
    export_model,
    finish,
    new_folder,
    store_tied_head_once,
    write_average,
)
from cpt.models.config import hash_weights
from cpt.models.new_rows import EXTENSION
from cpt.recipe.load import load_recipe
from cpt.train import train


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(OSError, match="full"), new_folder(tmp_path / "out") as unfinished:
        unfinished.mkdir()
        (unfinished / "half").touch()
        assert not (tmp_path / "out").exists()
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "out") as unfinished:
        unfinished.mkdir()
        (unfinished / "all").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "all"]


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path):
    with (
        pytest.raises(CheckpointError, match="out could not be written"),
        new_folder(tmp_path / "out"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_a_command_begins_anew_and_only_a_run_keeps_what_it_began(tmp_path):
    for is_begun in (False, True):
        hidden = tmp_path / f".{is_begun}.unfinished"
        hidden.mkdir()
        (hidden / "before").touch()
        with new_folder(tmp_path / str(is_begun), is_begun=is_begun) as unfinished:
            assert unfinished == hidden
            hidden.mkdir(exist_ok=True)
            (hidden / "now").touch()
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"before", "now"} and not (tmp_path / "False" / "before").exists()


def test_an_error_of_a_library_is_not_called_a_full_disk_in_a_command(tmp_path):
    for failure in (SafetensorError("no header"), OSError("no such model")):
        with pytest.raises(type(failure), match="no "), new_folder(tmp_path / "out"):
            raise failure
        with (
            pytest.raises(CheckpointError, match="Free disk space, or choose another folder"),
            new_folder(tmp_path / "out", of_run=True),
        ):
            raise failure
    with pytest.raises(CheckpointError, match="out could not"), new_folder(tmp_path / "out"):
        raise SafetensorError("os error 28: no space left")


def test_an_export_is_made_anew_or_its_failure_names_the_newest_checkpoint(
    tiny_recipe, base_folder, tmp_path
):
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "recipe.yaml"))
    tokenizer, model, run = (
        AutoTokenizer.from_pretrained(base_folder),
        random_llama(),
        tmp_path / "run",
    )
    arguments = TrainingArguments(output_dir=str(run), use_cpu=True)
    (run / ".final.unfinished").mkdir(parents=True)
    (run / ".final.unfinished" / "model-00001-of-00002.safetensors").touch()

    def save(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    sealed = []
    trainer = SimpleNamespace(model=model, args=arguments, save_model=save)
    export_model(trainer, recipe, tokenizer, run / "final", seal=sealed.append)
    assert sealed == [run / ".final.unfinished"] and not sealed[0].exists()
    weights = [path.name for path in (run / "final").glob("*.safetensors")]
    assert weights == ["model.safetensors"] and not (run / "final" / "README.md").exists()

    def fail(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step in (3, 12, 7):
        publish_empty(run / f"checkpoint-{step}", step)
    trainer = SimpleNamespace(model=model, args=arguments, save_model=fail)
    with pytest.raises(CheckpointError, match=r"final could not be .*/checkpoint-12 has the train"):
        export_model(trainer, recipe, tokenizer, run / "final", seal=sealed.append)
    assert len(sealed) == 1 and (run / "final" / "model.safetensors").is_file()


def publish_empty(folder, step):
    folder.mkdir()
    values = {"format": 1, "kind": "full", "step": step, "tokens": 64 * step, "world_size": 1}
    values |= {"zero_stage": None, "exactness": "bit-exact", "versions": {}, "files": {}}
    write_manifest(folder, Manifest(**values))


def test_what_training_changed_and_left_is_not_in_an_export(base_folder, tmp_path):
    folder = shutil.copytree(base_folder, tmp_path / "model")
    (folder / "adapter").mkdir()
    for leftover in (folder, folder / "adapter"):
        (leftover / "training_args.bin").touch()
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        content |= {"use_cache": False, "local_files_only": True}
        if name == "config.json":
            content["output_router_logits"] = True
        (folder / name).write_text(json.dumps(content))
    weights = (folder / "model.safetensors").read_bytes()
    finish(folder)
    assert not list(folder.rglob("training_args.bin"))
    config = json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (config["use_cache"], config["output_router_logits"]) == (True, False)
    assert generation["use_cache"] is True and "output_router_logits" not in generation
    assert "local_files_only" not in config.keys() | generation.keys()
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert (folder / "model.safetensors").read_bytes() == weights


# --- of a run --------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_a_lora_run_exports_the_adapter_beside_the_merged_model(tiny_recipe, base_folder, tmp_path):
    sections = {
        **tiny_recipe,
        "stage": "cpt",
        "model": {"path": str(base_folder), "lora": {"r": 4}},
    }
    sections["budget"]["tokens"] = 512
    sections["seed"] = 5
    folder = train(load_recipe(write_recipe(sections, tmp_path / "recipe.yaml")))
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    record = json.loads((folder / "adapter" / "base_weights.json").read_text())
    assert record["path"] == str(base_folder) and record["sha256"] == hash_weights(str(base_folder))
    assert not torch.equal(Tensors(folder).read(QUERY), Tensors(base_folder).read(QUERY))
    assert "run `tiny` (stage `cpt`)" in (folder / "README.md").read_text()
    assert len(AutoTokenizer.from_pretrained(folder)) == 320


QUERY = "model.layers.0.self_attn.q_proj.weight"


# --- a tied head, which ZeRO-1 and 2 save twice ----------------------------------------------------------------------


@pytest.fixture
def tied(tokenizer_folder, tmp_path):
    """A model whose head is its embedding, saved as ZeRO-2 saves it: both."""
    folder = save_llama(tmp_path / "tied", tokenizer_folder, 1, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("store_once", [store_tied_head_once, finish])
def test_a_tied_head_is_stored_once(tied, store_once):
    before = load_file(tied / "model.safetensors")
    store_once(tied)
    after = load_file(tied / "model.safetensors")
    assert after.keys() == before.keys() - {"lm_head.weight"}
    assert all(torch.equal(after[name], before[name]) for name in after)
    assert not list(tied.glob("*.index.json")) and not list(tied.parent.glob("tmp*"))


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_of_its_own_or_of_an_untied_model_stays(tied, is_tied):
    tensors = load_file(tied / "model.safetensors")
    if is_tied:  # in the config only
        tensors["lm_head.weight"] += 1
    else:
        config = json.loads((tied / "config.json").read_text())
        (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_file(tensors, tied / "model.safetensors", {"format": "pt"})
    before = (tied / "model.safetensors").read_bytes()
    store_tied_head_once(tied)
    assert (tied / "model.safetensors").read_bytes() == before


def test_a_tied_head_is_stored_once_in_shards_too(tied):
    model = AutoModelForCausalLM.from_pretrained(tied)
    (tied / "model.safetensors").unlink()
    model.config.tie_word_embeddings = False  # else it would not write the head
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tied, max_shard_size="42KB")  # the head has a file of its own
    config = json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tied / "config.json").write_text(json.dumps(config))
    assert "lm_head.weight" in Tensors(tied).files
    largest = max(file.stat().st_size for file in tied.glob("*.safetensors"))
    store_tied_head_once(tied)
    assert all(file.stat().st_size <= largest for file in tied.glob("*.safetensors"))
    assert Tensors(tied).files.keys() == model.state_dict().keys() - {"lm_head.weight"}
    shards = set(tied.glob("*.safetensors"))
    assert shards == set(Tensors(tied).files.values()) and len(shards) > 1


# --- the mean of checkpoints -----------------------------------------------------------------------------------------


@pytest.fixture
def checkpoints(base_folder, tmp_path):
    """Five checkpoints of a run with other weights, an integer and a scale in half precision."""
    for number, step in enumerate((2, 4, 6, 8, 10)):
        folder = shutil.copytree(base_folder, tmp_path / "run" / f"checkpoint-{step}")
        (folder / "trainer_state.json").write_text("{}")
        torch.manual_seed(number)
        tensors = load_file(folder / "model.safetensors")
        tensors = {name: torch.randn_like(x) * 3 for name, x in tensors.items()}
        tensors[SCALE] = tensors[SCALE].bfloat16()
        tensors["steps"] = torch.tensor([step, 2**40 + step])
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "training_args.bin").touch()
    return tmp_path / "run"


SCALE = "model.norm.weight"


def mean_of(run, *steps):
    models = [load_file(run / f"checkpoint-{step}" / "model.safetensors") for step in steps]
    mean = {name: sum(one[name].double() for one in models) / len(steps) for name in models[0]}
    last = models[-1]
    return {name: x.to(last[name].dtype) for name, x in mean.items()} | {"steps": last["steps"]}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


def test_the_last_checkpoints_of_a_run_are_averaged(checkpoints, tiny_recipe, tmp_path, capsys):
    """The mean is finished like the run's own model: it ends at turns, and its new tokens are listed."""
    base = tmp_path / "base"
    base.mkdir()
    (base / EXTENSION).write_text(json.dumps({"tokens": [{"id": 319}]}))
    sections = {
        "stage": "sft",
        "model": {"path": str(base)},
        "checkpoints": {"average": 3, "every_steps": 2, "keep": 5},
    }
    recipe = load_recipe(write_recipe({**tiny_recipe, **sections}, tmp_path / "recipe.yaml"))
    (checkpoints / "checkpoint-10/generation_config.json").write_text('{"eos_token_id": 7}')
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "checkpoint-10")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }} {{ message.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    export_average(recipe, tokenizer, checkpoints)
    average = checkpoints / "average"
    ends = json.loads((average / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [7, tokenizer.eos_token_id]
    extension = json.loads((average / EXTENSION).read_text())
    assert extension == {"tokens": [{"id": 319}], "trained": True}
    assert_equal(load_file(average / "model.safetensors"), mean_of(checkpoints, 6, 8, 10))
    mean = f"The mean of checkpoint-6, checkpoint-8, checkpoint-10 is in {average}.\n"
    assert capsys.readouterr().out == mean
    names = {path.name for path in average.iterdir()}
    assert {"config.json", "tokenizer.json"} < names and "trainer_state.json" not in names
    assert "rope_theta" in json.loads((average / "config.json").read_text())


@pytest.mark.parametrize(("average", "is_reported"), [(None, False), (4, True)])
def test_without_two_checkpoints_or_a_request_no_average_is_written(
    checkpoints, tiny_recipe, tmp_path, capsys, average, is_reported
):
    recipe = load_recipe(
        write_recipe(
            {**tiny_recipe, "checkpoints": {"average": average, "every_steps": 2, "keep": 5}},
            tmp_path / "recipe.yaml",
        )
    )
    for step in (2, 4, 6, 8) if average else ():
        shutil.rmtree(checkpoints / f"checkpoint-{step}")
    export_average(recipe, None, checkpoints)
    assert ("has 1 checkpoint." in capsys.readouterr().out) is is_reported
    assert not (checkpoints / "average").exists()


def test_fewer_checkpoints_than_requested_are_averaged_if_there_are_two(
    checkpoints, tiny_recipe, tmp_path
):
    request = {"checkpoints": {"average": 4, "every_steps": 2, "keep": 5}}
    recipe = load_recipe(write_recipe({**tiny_recipe, **request}, tmp_path / "recipe.yaml"))
    for step in (2, 4, 6):
        shutil.rmtree(checkpoints / f"checkpoint-{step}")
    export_average(
        recipe, AutoTokenizer.from_pretrained(checkpoints / "checkpoint-10"), checkpoints
    )
    found = load_file(checkpoints / "average" / "model.safetensors")
    assert_equal(found, mean_of(checkpoints, 8, 10))


def test_a_mean_has_the_dtype_that_was_asked_for_but_for_integers(checkpoints, tmp_path):
    folders = [checkpoints / f"checkpoint-{step}" for step in (4, 2)]
    write_average(folders, tmp_path / "out" / "half", dtype=torch.float16)
    expected = {
        name: x if name == "steps" else x.double().half()
        for name, x in mean_of(checkpoints, 4, 2).items()
    }
    found = load_file(tmp_path / "out" / "half" / "model.safetensors")
    assert found["steps"].tolist() == [2, 2**40 + 2]
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-2, msg=name)


def test_models_that_cannot_be_averaged_are_refused(checkpoints, adapter_folder, tmp_path):
    folders = [checkpoints / f"checkpoint-{step}" for step in (2, 4, 6)]
    with pytest.raises(CheckpointError, match="at least two"):
        write_average(folders[:1], tmp_path / "out", dtype=None)
    with pytest.raises(CheckpointError, match="is an adapter. Merge it first"):
        write_average([*folders, adapter_folder], tmp_path / "out", dtype=None)
    zero = folders[0].parent / "zero"
    (zero / "global_step1").mkdir(parents=True)
    (zero / "latest").write_text("global_step1")
    (zero / "global_step1" / "rank_0_optim_states.pt").touch()
    with pytest.raises(CheckpointError, match="zero has the parts of a ZeRO .* --output FOLDER"):
        write_average([zero, *folders], tmp_path / "out", dtype=None)
    file = folders[1] / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {QUERY: tensors[QUERY][:, :5].clone()}, file, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=rf"{QUERY} is \[32, 5\] in .*4 and \[32, 32\] in .*6"
    ):
        write_average(folders, tmp_path / "out", dtype=None)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="model.norm.weight is not in .*4 and"):
        write_average(folders, tmp_path / "out", dtype=None)
    assert not (tmp_path / "out").exists()
