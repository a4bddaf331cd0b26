"""Run promises: how to start a run, what a recipe can say, and which mistakes are found before training."""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from promises.conftest import ROOT, losses, tiny_recipe, weights, written
from transformers import AutoModelForCausalLM

from cpt import build_data, build_model, build_trainer, export_model, load_recipe, load_tokenizer
from cpt.errors import RecipeError
from cpt.train import train

BIN = Path(sys.executable).parent


@pytest.fixture(scope="session")
def whole(cpt, corpus, tokenizer_folder, tmp_path_factory) -> Path:
    """A recipe that was run to its end; its run is `runs/run` beside it."""
    folder = tmp_path_factory.mktemp("whole")
    file = written(folder / "recipe.yaml", tiny_recipe(corpus, tokenizer_folder, folder))
    assert (typed := cpt("train", file)).returncode == 0, typed.output
    return file


@pytest.fixture(scope="session")
def run_of(whole):
    return lambda name="run": whole.parent / "runs" / name


def shell(*words: object, **options) -> subprocess.Popen:
    """A command in a process of its own, without what launchers leave behind."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    }
    environment = {
        **kept,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([str(word) for word in words], cwd=ROOT, env=environment, **{**pipes, **options})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# Starting


@pytest.mark.slow
def test_five_ways_to_start_have_equal_losses(whole, run_of):
    program, port = ROOT / "cpt/train.py", free_port()
    ways = {
        "python": [sys.executable, program],
        "torchrun": [BIN / "torchrun", "--standalone", "--nproc_per_node=1", program],
        "accelerate": [BIN / "accelerate", "launch", "--cpu", "--num_processes=1", program],
        "deepspeed": [BIN / "deepspeed", "--num_gpus=1", f"--master_port={port}", program],
    }
    started = {name: shell(*words, whole, f"name={name}") for name, words in ways.items()}
    for name, process in started.items():
        output = process.communicate(timeout=400)[0]
        assert process.returncode == 0, output
        assert losses(run_of(name)) == losses(run_of()), name


@pytest.mark.slow
def test_from_python_a_run_is_the_same_as_from_the_command(whole, run_of):
    folder = train(load_recipe(whole, ["name=from-python"]))
    assert folder == run_of("from-python") / "final" and losses(run_of("from-python")) == losses(run_of())


def test_in_pieces_from_python_a_run_is_the_same_too(whole, run_of, tmp_path):
    recipe = load_recipe(whole, ["name=in-pieces"])
    tokenizer = load_tokenizer(recipe)
    trainer = build_trainer(recipe, build_model(recipe, tokenizer), tokenizer, build_data(recipe, tokenizer))
    trainer.train()
    folder = export_model(trainer, recipe, tokenizer, tmp_path / "model")
    assert losses(run_of("in-pieces")) == losses(run_of()) and (folder / "model.safetensors").read_bytes() == weights(
        run_of()
    )


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one(cpt, whole, run_of):
    typed = cpt("train", whole, "name=two", "--processes", 2)
    assert typed.returncode == 0, typed.output
    assert losses(run_of("two")) == pytest.approx(losses(run_of()), rel=1e-5)


def test_a_command_with_a_typo_ends_with_code_2_and_no_traceback(cpt, whole):
    for words in (("train",), ("train", whole, "--prcesses", 2), ("trian", whole), ("train", whole, "--processes", 0)):
        typed = cpt(*words)
        assert typed.returncode == 2 and "Traceback" not in typed.output, words


@pytest.mark.slow
def test_a_run_continues_when_its_output_is_closed(whole, run_of):
    read, written_to = os.pipe()
    os.close(read)
    process = shell(BIN / "cpt", "train", whole, "name=unread", stdout=written_to, stderr=written_to)
    os.close(written_to)
    assert process.wait(300) == 0 and losses(run_of("unread")) == losses(run_of())


# Recipes


def test_an_override_changes_what_it_says_and_nothing_else(cpt, whole, run_of):
    words = (
        "budget.tokens=512",
        "optimizer.learning_rate=1e-3",
        "schedule={name: constant}",
        "data.sources.0.weight=0.5",
    )
    assert cpt("train", whole, "name=changed", *words).returncode == 0
    rows = [json.loads(line) for line in (run_of("changed") / "metrics.jsonl").read_text().splitlines()]
    assert [row["learning_rate"] for row in rows if "loss" in row] == [1e-3, 1e-3]
    kept, before = (yaml.safe_load((run_of(name) / "recipe.yaml").read_text()) for name in ("changed", "run"))
    assert (
        kept["data"]["sources"][0]["weight"] == 0.5
        and kept["model"] == before["model"]
        and kept["seed"] == before["seed"]
    )


@pytest.mark.slow
def test_the_recipe_that_a_run_wrote_down_is_that_run(cpt, run_of):
    assert cpt("train", run_of() / "recipe.yaml", "name=again").returncode == 0
    assert losses(run_of("again")) == losses(run_of()) and weights(run_of("again")) == weights(run_of())


@pytest.mark.slow
def test_another_seed_is_another_run(whole):
    recipe = load_recipe(whole, ["name=seed", "seed=7", "budget.tokens=256"])
    train(recipe)
    assert losses(whole.parent / "runs/seed") != losses(whole.parent / "runs/run")[:1]


def test_a_global_batch_is_the_same_however_it_is_cut(whole, run_of):
    train(load_recipe(whole, ["name=four-at-once", "training.per_device_train_batch_size=4"]))
    assert losses(run_of("four-at-once")) == pytest.approx(losses(run_of()), rel=1e-5)


def test_a_budget_is_rounded_up_to_whole_steps_and_counted_in_tokens(recipe, write):
    recipe["budget"]["tokens"] = 600
    run = train(load_recipe(write(recipe))).parent
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["tokens"]) for row in rows if "loss" in row] == [(1, 256), (2, 512), (3, 768)]


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ({"name": "linear", "warmup_tokens": 512}, [1 / 2, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
        ({"name": "cosine", "floor": 0.2}, [0.2 + 0.4 * (1 + math.cos(math.pi * step / 8)) for step in range(1, 9)]),
        ({"name": "wsd", "decay_tokens": 1024}, [1] * 4 + [1 - math.sqrt(step / 4) for step in range(1, 5)]),
        (
            {"name": "continued", "trained_tokens": 2048, "schedule": {"name": "linear"}},
            [(8 - step) / 16 for step in range(1, 9)],
        ),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_the_learning_rate_of_each_step_is_that_of_the_formula(recipe, write, schedule, factors):
    loaded = load_recipe(write({**recipe, "schedule": schedule}))
    tokenizer = load_tokenizer(loaded)
    trainer = build_trainer(loaded, build_model(loaded, tokenizer), tokenizer, build_data(loaded, tokenizer))
    trainer.create_optimizer_and_scheduler(8)
    rates = []
    for _ in range(8):
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rates == pytest.approx([3e-3 * factor for factor in factors], abs=1e-9)


def test_a_section_can_be_a_file_with_keys_on_top(whole, tmp_path):
    recipe = yaml.safe_load(whole.read_text())
    written(tmp_path / "tiny.yaml", recipe["model"])
    recipe["model"] = {"base": "tiny.yaml", "dtype": "float32"}
    loaded = load_recipe(written(tmp_path / "recipe.yaml", recipe))
    assert loaded.model.config["hidden_size"] == 32 and loaded.model.dtype == "float32"


def test_numbers_take_underscores_exponents_and_units(whole):
    tokens = {
        load_recipe(whole, [f"budget.tokens={words}"]).budget.tokens for words in ("2_000_000", "2e6", "2M", "0.002B")
    }
    assert tokens == {2_000_000}


@pytest.mark.slow
def test_lora_trains_adapters_and_exports_a_merged_model(cpt, whole, run_of):
    words = f"model={{path: {run_of()}/final}}", "stage=cpt", "name=adapted"
    typed = cpt("train", whole, *words, "--lora")
    assert typed.returncode == 0, typed.output
    assert list(run_of("adapted").glob("checkpoint-*/adapter_model.safetensors"))
    base, merged = (
        AutoModelForCausalLM.from_pretrained(run_of(name) / "final").state_dict() for name in ("run", "adapted")
    )
    assert base.keys() == merged.keys()
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed and all("proj" in name for name in changed)


@pytest.mark.slow
def test_the_export_is_a_model_with_its_tokenizer_that_transformers_loads_alone(run_of):
    program = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T;"
        " T.from_pretrained(sys.argv[1])"
    )
    program += "; M.from_pretrained(sys.argv[1]); sys.exit(any(name.startswith('cpt') for name in sys.modules))"
    assert (
        subprocess.run(
            [sys.executable, "-c", program, run_of() / "final"], env={**os.environ, "HF_HUB_OFFLINE": "1"}
        ).returncode
        == 0
    )


# Names


def test_a_finished_run_is_left_alone(cpt, whole, run_of):
    before = {path: path.stat().st_mtime_ns for path in run_of().rglob("*")}
    assert cpt("train", whole).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in run_of().rglob("*")} == before


@pytest.mark.slow
def test_new_starts_beside_the_run_of_that_name(cpt, whole, run_of):
    assert cpt("train", whole, "--new", "budget.tokens=256").returncode == 0
    assert len(losses(run_of("run-2"))) == 1 and len(losses(run_of())) == 8


def test_two_runs_of_one_name_at_once_are_refused(start, cpt, recipe, write):
    file = write(recipe)
    first = start("train", file, "budget.tokens=1M")
    first.wait_until(lambda: (file.parent / "runs/run/metrics.jsonl").exists())
    second = cpt("train", file, "budget.tokens=1M")
    assert second.returncode == 2 and str(first.pid) in second.stderr
    first.signal(signal.SIGTERM)
    assert first.wait().returncode == 75


@pytest.mark.slow
def test_other_files_in_the_folder_of_a_run_are_not_touched(cpt, recipe, write, tmp_path):
    (tmp_path / "runs/run").mkdir(parents=True)
    (tmp_path / "runs/run/thesis.tex").write_text("mine")
    typed = cpt("train", write(recipe), "budget.tokens=256")
    assert typed.returncode in (0, 2) and (tmp_path / "runs/run/thesis.tex").read_text() == "mine"


@pytest.mark.slow
def test_a_run_that_was_begun_with_another_model_is_not_mixed_with_it(cpt, recipe, write, tmp_path):
    recipe["checkpoints"] = {"every_steps": 4}
    assert cpt("train", write(recipe)).returncode == 0
    shutil.rmtree(tmp_path / "runs/run/final")
    (tmp_path / "runs/run/status.json").unlink()
    typed = cpt("train", write(recipe), "model.config.hidden_size=64", "budget.tokens=4096")
    assert typed.returncode == 2 and "Traceback" not in typed.stderr


# Mistakes


@pytest.fixture
def refused(recipe, write):
    """What is said of a recipe that is refused."""

    def load(*overrides):
        with pytest.raises(RecipeError) as problem:
            load_recipe(write(recipe), overrides)
        return str(problem.value)

    return load


def test_all_mistakes_come_at_once_with_file_and_line_and_before_torch_is_loaded(recipe, write):
    recipe["data"]["sequence_length"] = "long"
    recipe["training"]["logging_setps"] = 1
    recipe["stge"] = recipe.pop("stage")
    file = write(recipe)
    process = shell(sys.executable, "-X", "importtime", "-m", "cpt", "train", file)
    output = process.communicate(timeout=200)[0]
    places = {
        word: number
        for number, line in enumerate(file.read_text().splitlines(), 1)
        for word in ("stge", "long", "setps")
        if word in line
    }
    assert process.returncode == 2 and len(places) == 3
    assert all(f"{file}:{number}: " in output for number in places.values())
    imported = {line.rsplit("|")[-1].strip() for line in output.splitlines() if line.startswith("import time:")}
    assert "cpt" in imported and not imported & {"torch", "transformers", "numpy"}


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("optimiser.learning_rate=1", "optimizer"),
        ("data.sequence_lenght=64", "sequence_length"),
        ("data.sources.0.wieght=1", "weight"),
        ("training.gradient_checkpoint=true", "gradient_checkpointing"),
        ("stage=pretrian", "pretrain"),
    ],
)
def test_an_unknown_key_or_stage_is_refused_with_the_nearest_known_one(refused, override, nearest):
    assert nearest in refused(override).replace(override, "")


@pytest.mark.parametrize(
    "override",
    [
        "seed=-1",
        "seed=many",
        "budget.tokens=0",
        "data.sequence_length=1",
        "optimizer.learning_rate=fast",
        "optimizer.learning_rate=nan",
        "optimizer.learning_rate=3",
        "seed=010",
    ]
    + [
        "training.bf16=yes please",
        "data.packing=tight",
        "checkpoints.keep=0",
        "data.sources=[]",
        "evaluation.held_out_share=0.9",
    ]
    + [
        "data.sources.7.weight=1",
        "name=",
        "name=../elsewhere",
        "budget.tokens",
        "training.per_device_train_batch_size=0",
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_its_key(refused, override):
    assert override.split("=")[0].split(".")[-1].removesuffix("s") in refused(override)


@pytest.mark.parametrize(
    "override",
    [
        "training.resume_from_checkpoint=x",
        "training.ignore_data_skip=true",
        "training.learning_rate=1e-4",
        "data.stride=32",
    ]
    + ["rewards=[exact_match]", "training.save_steps=5"],
)
def test_a_setting_without_effect_is_refused(refused, override):
    assert override.split("=")[0].split(".")[-1] in refused(override)


@pytest.mark.parametrize(
    ("text", "line"),
    [("name: x\nname: y\n", 2), ("name: x\n\tstage: cpt\n", 2), ("- a\n", 1), ("", 1), ("name: [x\nstage: y\n", 2)],
)
def test_a_file_that_is_not_a_recipe_is_refused_with_its_line(tmp_path, text, line):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match=rf"recipe\.yaml:{line}\b"):
        load_recipe(tmp_path / "recipe.yaml")


PHASES = "[{until: 512, weights: {domain: 1}}, {until: 256, weights: {general: 1}}, {weights: {domain: 1}}]"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["training.bf16=true", "training.fp16=true"], "training.fp16"),
        (["training.deepspeed=profile.json", "training.fsdp=true"], "training.fsdp"),
        (["budget.epochs=1"], "budget.epochs"),
        (["training.gradient_accumulation_steps=2"], "gradient_accumulation_steps"),
        (["model.trust_remote_code=true"], "model.revision"),
        (["data.packing=sliding_window", "data.stride=128"], "data.stride"),
        ([f"data.phases={PHASES}", "data.sources.0.weight=1", "data.sources.1.weight=1"], "data.phases[1].until"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(refused, overrides, key):
    assert key in refused(*overrides)


def test_an_impossible_global_batch_is_refused_with_a_possible_one(refused):
    assert "384" in refused("budget.global_batch_tokens=300")


@pytest.mark.parametrize("words", [("--restarts", 3), ("--processes", 2, "--launcher", "torchrun")])
def test_an_option_without_effect_is_refused(cpt, recipe, write, words):
    typed = cpt("train", write(recipe), *words)
    assert typed.returncode == 2 and words[0] in typed.stderr


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.sources.0.path=nowhere.jsonl", "nowhere.jsonl"),
        ("tokenizer.path=./nowhere", "nowhere"),
        ("optimizer.name=mine:none", "mine"),
        ("optimizer.beta=1", "betas"),
        ("schedule={name: constant, floor: 0.1}", "floor"),
    ],
)
def test_a_missing_file_option_or_function_is_refused_before_the_first_step(cpt, recipe, write, override, named):
    typed = cpt("train", file := write(recipe), override)
    assert typed.returncode == 2 and named in typed.stderr.replace(override, "") and "Traceback" not in typed.stderr
    assert not list(file.parent.rglob("metrics.jsonl"))


@pytest.mark.parametrize("place", ["/proc/runs", "{}/recipe.yaml/runs"])
def test_a_folder_that_cannot_be_written_is_refused(cpt, recipe, write, place):
    file = write(recipe)
    typed = cpt("train", file, f"output_dir={place.format(file.parent)}")
    assert typed.returncode == 2 and "output_dir" in typed.stderr and "Traceback" not in typed.stderr


def test_check_finds_what_train_refuses_and_starts_nothing(cpt, recipe, write):
    file = write(recipe)
    assert cpt("check", file).returncode == 0
    typed = cpt("check", file, "data.sources.0.path=nowhere.jsonl", "optimizer.beta=1")
    assert typed.returncode == 2 and "nowhere.jsonl" in typed.output and "betas" in typed.output
    assert not (file.parent / "runs").exists()


def test_from_python_a_recipe_s_mistakes_are_one_error(recipe, write):
    with pytest.raises(RecipeError) as refused:
        load_recipe(write(recipe), ["seed=-1", "data.packing=tight"])
    assert "seed" in str(refused.value) and "packing" in str(refused.value)


def test_an_incomplete_launcher_environment_is_refused(cpt, recipe, write):
    typed = cpt("train", write(recipe), environment={"WORLD_SIZE": "2"})
    assert typed.returncode == 2 and "RANK" in typed.stderr
