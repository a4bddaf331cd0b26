"""The inputs of a start are those that the run began with: files of models, commits of the Hub, the user's code."""

import json
import os
import shutil
import sys
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoints import save_llama
from transformers import AutoTokenizer

from cpt.data.readers.account import TextBytes
from cpt.data.rows.build import SourceReport
from cpt.errors import CheckpointError, RecipeError
from cpt.files import sealed
from cpt.models.config import hash_weights
from cpt.recipe.schema import Recipe
from cpt.runs.events import read_events
from cpt.runs.history import RecipeRecord, write_record
from cpt.training import inputs as module
from cpt.training.inputs import (
    NamedModel,
    RunInputs,
    describe_inputs,
    described_teacher,
    file_of_module,
    read_inputs_again,
    texts_in,
    with_commit,
)

COMMITS = ("1" * 40, "2" * 40)


def recipe_of(**changes):
    sections = {
        "name": "a-run",
        "model": {"path": "some/model"},
        "data": {"sequence_length": 64, "sources": [{"path": "a.txt"}]},
        "budget": {"tokens": 10_000, "global_batch_tokens": 512},
    }
    return Recipe.model_validate({**sections, **changes})


def begin(recipe, folder):
    """The inputs as a later start finds them."""
    folder.mkdir(exist_ok=True)
    first = RunInputs(folder, recipe, {})
    pinned = first.pinned(recipe, from_cache=True)
    return RunInputs(folder, recipe, json.loads(json.dumps(first.describe(pinned))))


def again(inputs):
    """A later start, in a process of its own."""
    return replace(inputs)


@pytest.fixture
def folders(tmp_path, base_folder, tokenizer_folder):
    """A base and a teacher with code beside the weights, and a tokenizer."""
    for name in ("base", "teacher"):
        shutil.copytree(base_folder, tmp_path / name)
        (tmp_path / name / "modeling_own.py").write_text("# remote code\n")
        (tmp_path / name / "generation_config.json").write_text('{"eos_token_id": 0}')
    shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    return tmp_path


@pytest.fixture
def begun(folders):
    recipe = recipe_of(
        stage="distill_text",
        model={"path": str(folders / "base")},
        tokenizer={"path": str(folders / "tokenizer")},
        training={"teacher_model_name_or_path": str(folders / "teacher")},
    )
    return begin(recipe, folders / "run")


def flip(path):
    """Change one bit, and restore the modification time."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("base/model.safetensors", "model.path"),
        ("base/config.json", "model.path"),
        ("base/generation_config.json", "model.path"),
        ("base/modeling_own.py", "model.path"),
        ("tokenizer/tokenizer.json", "tokenizer.path"),
        ("tokenizer/tokenizer_config.json", "tokenizer.path"),
        ("teacher/model.safetensors", "teacher_model_name_or_path"),
        ("teacher/tokenizer.json", "teacher_model_name_or_path"),
    ],
)
@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_a_changed_file_of_a_model_or_tokenizer_is_refused(begun, folders, name, key, how):
    flip(folders / name) if how == "flipped" else (folders / name).unlink()
    with pytest.raises(CheckpointError, match=name.partition("/")[2]) as problem:
        again(begun).refuse_changed(step=4, accept=True)
    assert key in str(problem.value) and "name=" in str(problem.value)


def test_a_new_file_that_may_be_loaded_is_refused_and_a_page_is_not(begun, folders):
    (folders / "base/README.md").write_text("# A model")
    again(begun).refuse_changed(step=4, accept=False)
    shutil.copy(folders / "base/model.safetensors", folders / "base/more.safetensors")
    with pytest.raises(CheckpointError, match="more.safetensors"):
        again(begun).refuse_changed(step=4, accept=False)


def test_an_unchanged_file_is_not_read_again_and_a_copied_folder_only_once(begun, folders):
    read = []
    inputs = again(begun)
    hash_file = inputs.hashes.hash_file
    inputs.hashes.hash_file = lambda path: read.append(path.name) or hash_file(path)
    inputs.refuse_changed(step=4, accept=False)
    assert read == []
    shutil.move(folders / "base", folders / "old")
    shutil.copytree(folders / "old", folders / "base")
    inputs.refuse_changed(step=4, accept=False)
    assert "model.safetensors" in read
    read.clear()
    inputs.refuse_changed(step=4, accept=False)
    assert read == []


def test_weights_that_an_older_version_recorded_are_compared(folders):
    recipe = recipe_of(model={"path": str(folders / "base")})
    recorded = {"weights": {"sha256": hash_weights(str(folders / "base"))}}
    inputs = RunInputs(folders, recipe, recorded)
    inputs.refuse_changed(step=4, accept=False)
    flip(folders / "base/model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        again(inputs).refuse_changed(step=4, accept=False)


# --- the Hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, base_folder, monkeypatch):
    """A cache of the Hub with two commits of `lab/tiny`; `main` is the first."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub/models--lab--tiny"
    for commit in COMMITS:
        shutil.copytree(base_folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMITS[0])
    return repository


def test_a_hub_id_stays_at_the_commit_of_the_first_start(hub, tmp_path):
    recipe = recipe_of(
        model={"path": "lab/tiny"},
        stage="distill_text",
        training={"teacher_model_name_or_path": "lab/tiny"},
    )
    inputs = begin(recipe, tmp_path / "run")
    (hub / "refs/main").write_text(COMMITS[1])
    inputs.refuse_changed(step=4, accept=False)
    pinned = inputs.pinned(recipe)
    assert pinned.model.revision == pinned.training["teacher_model_revision"] == COMMITS[0]
    assert (
        RunInputs(tmp_path, recipe, {}).pinned(recipe, from_cache=True).model.revision
        == (COMMITS[1])
    )


def test_the_commit_is_that_of_the_branch_that_the_recipe_names(hub, tmp_path):
    (hub / "refs/v2").write_text(COMMITS[1])
    recipe = recipe_of(model={"path": "lab/tiny", "revision": "v2"}, tokenizer={"path": "lab/tiny"})
    inputs = begin(recipe, tmp_path / "run")
    assert inputs.pinned(recipe).model.revision == COMMITS[1]
    assert inputs.recorded["files"]["model.path"]["revision"] == "v2"


def test_a_reward_model_is_pinned_too(hub, tmp_path):
    reward = {"name": "reward_model", "path": "lab/tiny"}
    recipe = recipe_of(model={"path": "lab/tiny"}, stage="grpo", rewards=[reward])
    inputs = begin(recipe, tmp_path / "run")
    (hub / "refs/main").write_text(COMMITS[1])
    assert inputs.pinned(recipe).rewards[0].options["revision"] == COMMITS[0]


def test_a_damaged_file_in_the_cache_is_refused_and_one_that_is_not_there_is_not(hub, tmp_path):
    inputs = begin(recipe_of(model={"path": "lab/tiny"}), tmp_path / "run")
    (hub / "snapshots" / COMMITS[0] / "generation_config.json").unlink(missing_ok=True)
    inputs.refuse_changed(step=4, accept=False)
    flip(hub / "snapshots" / COMMITS[0] / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        again(inputs).refuse_changed(step=4, accept=False)


# --- the user's code -------------------------------------------------------------------------------------------------


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("own_lab", "own_lab.steps", "own_watch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "own_lab").mkdir()
    for name in ("own_lab/__init__.py", "own_lab/steps.py", "own_watch.py"):
        (tmp_path / name).write_text("def part(): ...\n")
    return tmp_path


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"name": "own_lab.steps:part"}},
        {"stage": "grpo", "rewards": ["own_lab.steps:part"]},
        {"schedule": {"name": "own_lab.steps:part"}},
        {"stage": "own_lab.steps"},
        {"model": {"path": "some/model", "import": "own_lab.steps"}},
        {
            "optimizer": {"name": "own_lab.steps:part"},
            "monitoring": {"callbacks": ["own_lab.steps:part"]},
        },
    ],
    ids=["optimizer", "reward", "schedule", "stage", "family", "optimizer and callback"],
)
def test_changed_code_of_the_user_needs_to_be_accepted_and_is_an_event(own_code, changes):
    inputs = begin(recipe_of(**changes), own_code / "run")
    inputs.refuse_changed(step=4, accept=False)
    (own_code / "own_lab/steps.py").write_text("def part(): return 1\n")
    with pytest.raises(RecipeError, match=r"steps\.py .*--change"):
        again(inputs).refuse_changed(step=4, accept=False)
    accepted = again(inputs)
    accepted.refuse_changed(step=4, accept=True)
    assert accepted.is_renewed and read_events(own_code / "run")[0]["kind"] == "changed_code"


def test_a_callback_may_change_and_that_is_an_event(own_code):
    recipe = recipe_of(monitoring={"callbacks": ["own_watch:part"]})
    inputs = begin(recipe, own_code / "run")
    (own_code / "own_watch.py").write_text("def part(): return 1\n")
    inputs.refuse_changed(step=4, accept=False)
    assert read_events(own_code / "run")[0]["kind"] == "changed_code"


def test_texts_with_a_colon_that_name_no_module_are_no_code(own_code):
    recipe = recipe_of(evaluation={"prompts": ["question:answer", "json:dumps"]})
    assert {code.module for code in RunInputs(own_code, recipe, {}).code} <= {"json"}


# --- what is recorded ------------------------------------------------------------------------------------------------


def test_the_record_holds_the_hashes_of_model_tokenizer_and_data(tokenizer_folder, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    facts = {
        "documents": 3,
        "held_out": 0,
        "tokens": 10,
        "share": 1.0,
        "licence": None,
        "is_estimate": False,
        "bad_rows": {},
        "text": TextBytes(trained=30, held_out=0, dropped={}),
        "files_read": (1, 30),
        "files_passed_over": {},
        "lengths": {},
        "rows": 1,
        "padding": 0.0,
    }
    source = SourceReport(name="a", dropped={}, files={"a.txt": "0f"}, **facts)
    held_out = {"exam": {"b.txt": "1e"}}
    data = SimpleNamespace(
        fingerprint="abc",
        num_tokens=10,
        sources=[source],
        held_out={
            "exam": SimpleNamespace(left_out="`exam`: one is too long."),
            "whole": SimpleNamespace(left_out=""),
        },
        held_out_files=held_out,
    )
    profile = {"zero_optimization": {"stage": 2}}
    chosen = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "deepspeed": profile,
    }
    made = SimpleNamespace(device=torch.device("cpu"), **chosen)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    recipe = recipe_of(model={"path": str(tmp_path)}, training={"per_device_train_batch_size": 2})
    inputs = describe_inputs(RunInputs(tmp_path, recipe, {}), recipe, data, tokenizer, made)
    assert inputs["weights"]["sha256"] == {"model.safetensors": sha256(b"weights").hexdigest()}
    assert (
        inputs["data"]["sources"]["a"]["files"] == {"a.txt": "0f"}
        and inputs["data"]["held_out"] == held_out
        and inputs["data"]["left_out"] == {"exam": "`exam`: one is too long."}
    )
    assert inputs["data"]["sources"]["a"]["account"].startswith(
        "a: 1 file read (30 B); 3 documents"
    )
    assert len(inputs["tokenizer"]["xxh3"]) == 32 and inputs["training"] == chosen


@pytest.mark.parametrize("is_local", [True, False])
def test_a_teacher_is_recorded_with_its_hashes_where_it_is_on_the_disk(
    is_local, tmp_path, tokenizer_folder
):
    path = str(save_llama(tmp_path / "teacher", tokenizer_folder, 1)) if is_local else "lab/large"
    distilled = recipe_of(stage="distill_text", training={"teacher_model_name_or_path": path})
    described = RunInputs(tmp_path, distilled, {}).describe(distilled)
    hashes = hash_weights(path) if is_local else {}
    assert described_teacher(described) == {
        "teacher": {"path": path, "revision": None, "sha256": hashes}
    }
    assert bool(hashes) is is_local


def test_the_first_three_changes_are_named_with_what_they_are(begun, folders):
    flip(folders / "base/config.json")
    (folders / "base/generation_config.json").unlink()
    shutil.copy(folders / "base/model.safetensors", folders / "base/extra.safetensors")
    flip(folders / "base/modeling_own.py")
    flip(folders / "base/model.safetensors")
    with pytest.raises(CheckpointError) as problem:
        again(begun).refuse_changed(step=4, accept=True)
    listed = (
        "config.json differs, extra.safetensors is new, generation_config.json is missing. Rest"
    )
    assert f"(`model.path`): {listed}" in str(problem.value)


def test_all_files_are_read_again_even_where_nothing_seems_to_have_changed(begun, folders):
    run = folders / "run"
    with pytest.raises(CheckpointError, match="has no record of its inputs"):
        read_inputs_again(run)
    write_record(run, RecipeRecord(begun.recipe, []))
    with pytest.raises(CheckpointError, match="has no record of its inputs"):
        read_inputs_again(run)
    (run / "inputs.json").write_text(sealed(begun.recorded))
    number = sum(len(entry["sha256"]) for entry in begun.recorded["files"].values())
    assert number > 8 and read_inputs_again(run) == number
    flip(folders / "teacher/model.safetensors")
    with pytest.raises(CheckpointError, match="teacher.*: model.safetensors differs"):
        read_inputs_again(run)


@pytest.mark.parametrize(
    ("held_out", "is_refused"),
    [
        ({"exam": {"b.txt": "1e", "c.txt": "2f"}}, False),
        ({"exam": {"moved/c.txt": "2f", "moved/b.txt": "1e"}}, False),
        ({"a new one": {"b.txt": "00"}}, False),
        ({}, False),
        ({"general": {"a.txt": "0d"}, "exam": {"b.txt": "1e", "c.txt": "00"}}, True),
        ({"exam": {"b.txt": "1e"}}, True),
    ],
)
def test_held_out_sets_keep_their_documents(held_out, is_refused, tmp_path):
    recorded = {"general": {"a.txt": "0d"}, "exam": {"b.txt": "1e", "c.txt": "2f"}}
    inputs = RunInputs(tmp_path, recipe_of(), {"data": {"held_out": recorded}})
    if not is_refused:
        inputs.refuse_changed_sets(held_out)
        return
    with pytest.raises(CheckpointError, match="other documents in the held-out set `exam`"):
        inputs.refuse_changed_sets(held_out)


def test_datasets_of_the_hub_stay_at_the_commits_that_were_recorded(tmp_path, monkeypatch):
    pinned = {"of another run": "0"}
    monkeypatch.setattr(module, "PINNED", pinned)
    asked = []

    def hub_files(source, path):
        asked.append(path)
        return SimpleNamespace(commit=COMMITS[len(asked) - 1])

    monkeypatch.setattr(module, "hub_files", hub_files)
    sources = [{"path": "a.txt"}, {"path": "lab/web", "revision": "v1"}]
    recipe = recipe_of(
        data={"sequence_length": 64, "sources": sources},
        evaluation={"perplexity": [{"path": "lab/exam"}]},
    )
    described = RunInputs(tmp_path, recipe, {}).describe(recipe)
    assert asked == ["lab/web", "lab/exam"] and len(described["datasets"]) == 2
    assert list(described["datasets"].values()) == list(COMMITS)
    RunInputs(tmp_path, recipe, described).pinned(recipe)
    assert pinned == described["datasets"]
    first = RunInputs(tmp_path, recipe, {})
    first.pinned(recipe)
    assert pinned == {} and not first.is_renewed


def test_a_commit_is_set_where_its_key_says_and_nowhere_else():
    rewards = [{"name": "reward_model", "path": f"lab/{name}"} for name in "abc"]
    recipe = recipe_of(
        stage="grpo",
        model={"path": "lab/base", "revision": "v0"},
        tokenizer={"path": "lab/words"},
        training={"teacher_model_name_or_path": "lab/large"},
        rewards=rewards,
    )

    def revisions(changed):
        of_rewards = [reward.options.get("revision") for reward in changed.rewards]
        teacher = changed.training.get("teacher_model_revision")
        return [changed.model.revision, changed.tokenizer.revision, teacher, *of_rewards]

    keys = ("model.path", "tokenizer.path", module.TEACHER, *(f"rewards[{n}].path" for n in "012"))
    before = ["v0", None, None, None, None, None]
    assert revisions(recipe) == before
    for number, key in enumerate(keys[:3]):
        expected = [*before[:number], "c0", *before[number + 1 :]]
        assert revisions(with_commit(recipe, key, "c0")) == expected
    reward = with_commit(recipe, "rewards[1].path", "c0").rewards[1]
    assert reward.model_dump()["revision"] == "c0"
    others = with_commit(recipe, "rewards[1].path", "c0").rewards
    assert [others[0], others[2]] == [recipe.rewards[0], recipe.rewards[2]]


def test_a_tokenizer_that_is_one_file_is_this_file(tmp_path):
    (tmp_path / "tokenizer.model").write_text("pieces")
    (tmp_path / "other.safetensors").touch()
    path = tmp_path / "tokenizer.model"
    assert NamedModel("tokenizer.path", str(path), None).files() == {"tokenizer.model": path}


def test_only_files_of_the_user_are_code(own_code):
    assert file_of_module("own_lab.steps") == own_code / "own_lab" / "steps.py"
    (own_code / "without_init").mkdir()
    for name in (
        "without_init",
        "cpt",
        "cpt.train",
        "own_lab.missing",
        "nowhere_lab.steps",
        "sys",
        ".relative",
    ):
        assert file_of_module(name) is None


def test_each_text_has_its_key():
    content = {"a": "x", "b": [{"c": "y"}, 3, "z"], "d": {"e": {"f": "w"}}}
    assert list(texts_in(content)) == [("a", "x"), ("b.0.c", "y"), ("b.2", "z"), ("d.e.f", "w")]
