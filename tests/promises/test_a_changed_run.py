"""Promises about a run whose recipe changes after its start."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from promises.conftest import losses, metrics, tiny_recipe, weights, write_documents, written

pytestmark = pytest.mark.heavy
STABLE = {"name": "wsd", "decay_tokens": 512, "warmup_tokens": 256}


@pytest.fixture(scope="session")
def file(corpus, tokenizer_folder, tmp_path_factory) -> Path:
    """A recipe of 8 steps that saves every second one."""
    folder = tmp_path_factory.mktemp("changed")
    sections = tiny_recipe(corpus, tokenizer_folder, folder)
    sections |= {
        "output_dir": "runs",
        "schedule": STABLE,
        "checkpoints": {"every_steps": 2, "keep": None},
    }
    sections |= {"monitoring": {"callbacks": [{"name": "my_lab:Trouble"}]}}
    shutil.copy(Path(__file__).with_name("user_parts.py"), folder / "my_lab.py")
    write_documents(folder / "new.jsonl", 60, 7)
    return written(folder / "recipe.yaml", sections)


@pytest.fixture(scope="session")
def straight(cpt, file) -> Path:
    """The run without changes."""
    assert (typed := cpt("train", file, folder=file.parent)).returncode == 0, typed.output
    return file.parent / "runs/run"


@pytest.fixture(scope="session")
def killed(cpt, file) -> Path:
    """The folder of a run that was killed after step 5, with checkpoints of steps 2 and 4."""
    folder = file.parent / "killed"
    folder.mkdir()
    for name in ("my_lab.py", "new.jsonl"):
        shutil.copy(file.with_name(name), folder)
    assert (
        cpt("train", file, folder=folder, environment={"TROUBLE": "kill@5"}).returncode
        == -signal.SIGKILL
    )
    return folder


@pytest.fixture
def stopped(killed, tmp_path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "stopped"))


@pytest.fixture
def train(cpt, file, stopped):
    """Type `cpt train` with other keys in the folder of the killed run."""
    return lambda *words, **options: cpt("train", file, *words, folder=stopped, **options)


def history(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    kept = (
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (".lock", "debug.log")
    )
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in kept
        if "__pycache__" not in path.parts
    }


def test_free_changes_are_applied_and_change_no_loss(train, straight, stopped, tmp_path):
    words = [
        "checkpoints.keep=2",
        "checkpoints.every_steps=3",
        f"checkpoints.archive={tmp_path}/archive",
    ]
    words += [
        "evaluation.prompts=[the model]",
        "data.sources.0.licence=CC0-1.0",
        "training.logging_steps=2",
    ]
    words += ["training.dataloader_num_workers=1", "training.dataloader_prefetch_factor=4"]
    words += ["training.dataloader_persistent_workers=true", "training.dataloader_pin_memory=true"]
    typed, run = train(*words), stopped / "runs/run"
    assert typed.returncode == 0, typed.output
    assert weights(run) == weights(straight)
    changed = {one["key"].replace("[domain]", ".0") for one in history(run)[0]["changes"]}
    assert changed == {word.partition("=")[0] for word in words}
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4, 6, 8]
    archived = tmp_path / "archive/run/checkpoint-8/model.safetensors"
    assert archived.read_bytes() == (run / "checkpoint-8/model.safetensors").read_bytes()
    (sample,) = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    assert (sample["step"], sample["prompt"]) == (8, "the model") and sample["continuation"]
    assert [path.name for path in sorted(run.glob("checkpoint-*"))] == [
        "checkpoint-6",
        "checkpoint-8",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("training.per_device_train_batch_size=1",),
        ("training.per_device_train_batch_size=4",),
        ("training.gradient_checkpointing=true",),
        ("model.attention=eager", "model.fused_loss=true"),
        ("training.torch_compile=true", "training.torch_compile_backend=aot_eager"),
    ],
)
def test_another_way_to_compute_a_step_changes_losses_by_rounding_only(
    train, straight, stopped, words
):
    typed = train(*words)
    assert typed.returncode == 0, typed.output
    assert losses(stopped / "runs/run") == pytest.approx(losses(straight), rel=1e-5)
    manifest = json.loads((stopped / "runs/run/checkpoint-8/manifest.json").read_text())
    assert manifest["exactness"].startswith("rounding: ")


def test_a_longer_budget_follows_the_new_schedule_once_it_is_accepted(train, straight, stopped):
    run, before = stopped / "runs/run", contents(stopped)
    typed = train("budget.tokens=3072")
    assert (
        typed.returncode == 2
        and "--change" in typed.output
        and "budget.tokens: 2048 -> 3072" in typed.output
    )
    assert contents(stopped) == before
    assert (typed := train("budget.tokens=3072", "--change", "--note", "more")).returncode == 0, (
        typed.output
    )
    rates = [row["learning_rate"] for row in metrics(run)]
    assert rates[:10] == [3e-3] * 10 and len(rates) == 12 and rates[11] == 0
    assert losses(run)[:4] == losses(straight)[:4] and history(run)[0]["note"] == "more"


@pytest.mark.slow
def test_a_finished_run_continues_with_a_larger_budget(cpt, file, straight, tmp_path):
    shutil.copytree(straight.parents[1], tmp_path / "copy", ignore=shutil.ignore_patterns("killed"))
    words = ["--resume", "runs/run/checkpoint-6", "budget.tokens=3072", "--change"]
    typed = cpt("train", file, *words, folder=tmp_path / "copy")
    assert typed.returncode == 0 and len(losses(tmp_path / "copy/runs/run")) == 12, typed.output


@pytest.mark.slow
def test_another_learning_rate_holds_from_the_next_step_on(train, straight, stopped):
    assert train("optimizer.learning_rate=1e-3", "--change").returncode == 0
    run = stopped / "runs/run"
    assert [row["learning_rate"] for row in metrics(run)][:6] == [3e-3] * 4 + [1e-3] * 2
    assert losses(run)[:5] == losses(straight)[:5] and losses(run)[5] != losses(straight)[5]


@pytest.mark.parametrize(
    "words",
    [
        ("seed=1", "--change"),
        ("data.sequence_length=32", "--change"),
        ("model.config.hidden_size=64", "--change"),
        ("optimizer.weight_decay=0.3", "--change"),
        ("budget.global_batch_tokens=512", "--change"),
        ("budget.tokens=1024", "--change"),  # trained already
        ("schedule.decay_tokens=1536", "--change"),  # the decay would have begun before
        ("data.sources.1.weight=0", "--change"),
        ("data.sources.1.path=new.jsonl", "data.sources.1.name=general", "--change"),
        ("data.sources.1.name=renamed", "--change"),
        ("data.sources=[{path: missing.jsonl}]", "--change"),
    ],
)
def test_a_change_that_a_run_cannot_follow_is_refused_and_nothing_is_written(train, stopped, words):
    before = contents(stopped)
    typed = train(*words)
    assert (
        typed.returncode == 2 and "Error: " in typed.output and "Traceback" not in typed.output
    ), typed.output
    key = words[0].partition("=")[0].split(".")[-1]
    said = typed.output.replace(f"`{words[0]}`", "")  # what was typed is quoted
    assert re.search(rf"`[\w.\[\]]*\b{key}\b[\w.\[\]]*`", said), f"{key} is not named: {said}"
    assert words[0] != "budget.tokens=1024" or "has trained 1,024 tokens already" in typed.output
    after = contents(stopped)
    if (
        words[0] != "data.sources=[{path: missing.jsonl}]"
    ):  # found by the check of a start, which is on record
        assert after == before
    assert not (stopped / "runs/run/history.jsonl").exists()
    assert after["runs/run/recipe.yaml"] == before["runs/run/recipe.yaml"]


@pytest.mark.slow
def test_a_mixture_that_changes_twice_between_kills_is_the_same_run_as_without_kills(
    cpt, train, file, stopped
):
    new = "{path: new.jsonl, weight: 1}"
    first = [f"data.sources={sources(file, 0.5, 0.2, new)}", "--change"]
    second = [
        f"data.sources={sources(file, 0.5, None, new)}",
        "--change",
        "--note",
        "general is retired",
    ]
    killed = {"environment": {"TROUBLE": "kill@7"}}
    assert train(*first, **killed).returncode == -signal.SIGKILL  # from step 4 on
    assert train(*second).returncode == 0  # from step 6 on
    run = stopped / "runs/run"
    assert [line["step"] for line in history(run)] == [4, 6]
    assert history(run)[1]["positions"]["new"]["rows"] > 0
    # `cpt reproduce` makes the same changes at the same steps, without a kill.
    typed = cpt("reproduce", "runs/run", folder=stopped)
    assert typed.returncode == 0 and "Bit-equal" in typed.output, typed.output


def sources(file: Path, domain: float, general: float | None, new: str) -> str:
    corpus = file.read_text()
    paths = [
        line.split("path: ")[1].strip()
        for line in corpus.splitlines()
        if "path: /" in line and "jsonl" in line
    ]
    known = [
        f"{{path: {path}, weight: {one}}}"
        for path, one in zip(paths, (domain, general), strict=True)
        if one
    ]
    return f"[{', '.join([*known, new])}]"


@pytest.mark.slow
def test_a_run_with_three_changes_is_reproduced_bit_for_bit(cpt, train, stopped):
    assert (
        train(
            "optimizer.learning_rate=1e-3", "--change", environment={"TROUBLE": "kill@7"}
        ).returncode
        < 0
    )
    words = [
        "optimizer.learning_rate=1e-3",
        "training.per_device_train_batch_size=4",
        "budget.tokens=3072",
    ]
    assert train(*words, "--change", environment={"TROUBLE": "kill@9"}).returncode < 0
    assert train(*words, "data.sources.0.weight=0.1", "--change").returncode == 0
    assert [line["step"] for line in history(stopped / "runs/run")] == [4, 6, 8]
    typed = cpt("reproduce", "runs/run", folder=stopped)
    assert typed.returncode == 0 and "Bit-equal" in typed.output, typed.output


@pytest.mark.slow
def test_a_change_holds_only_from_its_step_if_its_checkpoint_is_lost(train, stopped):
    run = stopped / "runs/run"
    assert (
        train("data.sources.0.weight=0.1", "optimizer.learning_rate=1e-3", "--change").returncode
        == 0
    )
    whole = weights(run)
    for name in ("checkpoint-4", "checkpoint-6", "checkpoint-8", "final"):
        shutil.rmtree(run / name)
    (run / "status.json").write_text("{}")
    typed = train("data.sources.0.weight=0.1", "optimizer.learning_rate=1e-3")
    assert typed.returncode == 0 and weights(run) == whole, typed.output


@pytest.mark.slow
def test_a_run_goes_back_before_a_change_with_the_recipe_of_then(train, straight, stopped):
    run = stopped / "runs/run"
    assert train("optimizer.learning_rate=1e-3", "budget.tokens=3072", "--change").returncode == 0
    typed = train("--resume", "runs/run/checkpoint-2")
    assert typed.returncode == 0 and weights(run) == weights(straight) and history(run) == [], (
        typed.output
    )
    typed = train("--resume", "none", "seed=1", "budget.tokens=1024")
    assert (
        typed.returncode == 0
        and len(losses(run)) == 4
        and "seed: 1" in (run / "recipe.yaml").read_text()
    )


@pytest.mark.slow
def test_a_branch_from_before_a_change_does_not_make_it(cpt, train, file, stopped, straight):
    assert train("optimizer.learning_rate=1e-3", "--change").returncode == 0
    words = ["--from-checkpoint", "runs/run/checkpoint-2", "name=other"]
    typed = cpt("train", file, *words, folder=stopped)
    assert typed.returncode == 0 and losses(stopped / "runs/other") == losses(straight), (
        typed.output
    )
    assert [line["step"] for line in history(stopped / "runs/other")] == [2]


@pytest.mark.slow
def test_a_held_out_set_may_be_added_and_the_sources_read_on(train, straight, stopped, corpus):
    words = [
        f"evaluation.perplexity=[{{path: {corpus}/held_out.jsonl}}]",
        "evaluation.every_steps=2",
    ]
    typed = train(*words, "--change")
    assert typed.returncode == 0 and "held-out sets: take other texts" in typed.output, typed.output
    run = stopped / "runs/run"
    assert [row["step"] for row in metrics(run, having="eval_held_out_loss")] == [4, 6, 8]
    assert losses(run)[:4] == losses(straight)[:4] and history(run)[0]["new_stretch"]


@pytest.mark.slow
def test_a_branch_begins_with_the_optimizer_and_data_of_its_checkpoint(cpt, file, straight):
    words = ["--from-checkpoint", "runs/run/checkpoint-4"]
    typed = cpt("train", file, *words, "name=same", folder=file.parent)
    branch = file.parent / "runs/same"
    assert typed.returncode == 0 and weights(branch) == weights(straight), typed.output
    assert metrics(branch)[:4] == metrics(straight)[:4] and history(branch)[0]["changes"] == []
    typed = cpt("train", file, *words, "name=decayed", "budget.tokens=1536", folder=file.parent)
    assert typed.returncode == 0 and len(metrics(file.parent / "runs/decayed")) == 6, typed.output
    typed = cpt("reproduce", "runs/decayed", folder=file.parent)
    assert typed.returncode == 0 and "Bit-equal" in typed.output, typed.output
    assert cpt("train", file, *words, folder=file.parent).returncode == 2  # the name of the trunk
