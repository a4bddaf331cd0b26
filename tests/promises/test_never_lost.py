"""Reliability promises: whatever stops a run, the same command resumes it with the same losses and weights, bit for
bit."""

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from promises.conftest import (
    events,
    losses,
    metrics,
    status,
    tiny_recipe,
    trainer_of,
    weights,
    write_texts,
    written,
)
from safetensors.torch import load_file
from tiny import Planted

from cpt import load_recipe
from cpt.train import train as train_recipe

pytestmark = pytest.mark.heavy
STEPS = 8
DAMAGES = ("cut", "zeroed", "flipped bit", "missing")
NO_DROPOUT = ("model.config.attention_dropout=0",)


@pytest.fixture(scope="session")
def file(corpus, tokenizer_folder, tmp_path_factory) -> Path:
    """A recipe whose dropout draws random numbers, and whose parts can make trouble (see user_parts.py)."""
    folder = tmp_path_factory.mktemp("never_lost")
    sections = tiny_recipe(corpus, tokenizer_folder, folder)
    sections["model"]["config"]["attention_dropout"] = 0.1
    sections |= {"output_dir": "runs", "checkpoints": {"every_steps": 2}}
    sections |= {"optimizer": {"name": "my_lab:adamw", "learning_rate": 3e-3}}
    sections |= {"monitoring": {"callbacks": [{"name": "my_lab:Trouble"}]}}
    shutil.copy(Path(__file__).with_name("user_parts.py"), folder / "my_lab.py")
    return written(folder / "recipe.yaml", sections)


@pytest.fixture(scope="session")
def straight(cpt, file) -> Path:
    """The uninterrupted run."""
    assert (typed := cpt("train", file, folder=file.parent)).returncode == 0, typed.output
    return file.parent / "runs/run"


@pytest.fixture(scope="session")
def killed(cpt, file) -> Path:
    """The folder of a run that was killed after step 6, with checkpoints of steps 2 and 4."""
    folder = file.parent / "killed"
    folder.mkdir()
    shutil.copy(file.with_name("my_lab.py"), folder)
    assert (
        cpt("train", file, folder=folder, environment={"TROUBLE": "kill@6"}).returncode
        == -signal.SIGKILL
    )
    return folder / "runs/run"


@pytest.fixture(scope="session")
def of_two(together, file) -> Path:
    """The uninterrupted run of two processes, without dropout, which would draw other numbers on one."""
    folder = file.parent / "of_two"
    folder.mkdir()
    shutil.copy(file.with_name("my_lab.py"), folder)
    for one in together(2, "train", file, *NO_DROPOUT, folder=folder):
        assert one.wait().returncode == 0, one.output
    return folder / "runs/run"


@pytest.fixture
def train(cpt, file, my_lab):
    """Type `cpt train` in a folder of the test's own, with trouble or without."""

    def begin(*words, trouble="", environment=None):
        return cpt(
            "train",
            file,
            *words,
            folder=my_lab,
            environment={"TROUBLE": trouble, **(environment or {})},
        )

    return begin


@pytest.fixture
def run(my_lab) -> Path:
    return my_lab / "runs/run"


def assert_same(run, straight) -> None:
    """Each step once, with the losses, the weights and the checkpoints of the uninterrupted run."""
    steps = [row["step"] for row in metrics(run)]
    assert steps == [*range(1, STEPS + 1)], "a step is missing or repeated"
    assert losses(run) == losses(straight), "losses differ"
    assert weights(run) == weights(straight), "weights differ"
    for name in {*checkpoints(run)} & {*checkpoints(straight)}:
        assert learned_of(run / name) == learned_of(straight / name), f"{name} differs"


def learned_of(checkpoint) -> dict[str, str]:
    """The hashes of a checkpoint's weights and states."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    learned = ("model", "optimizer", "scheduler", "rng_state")
    hashes = {name: files[name]["xxh3_128"] for name in files if name.startswith(learned)}
    assert len(hashes) >= 4, f"{checkpoint} lacks files"
    return hashes


def checkpoints(run) -> list[str]:
    return sorted(folder.name for folder in run.glob("checkpoint-*"))


@pytest.fixture
def copy(killed, run):
    """The killed run again, in the test's own folder."""

    def fresh():
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(killed, run)
        return run

    return fresh


# Killed


def test_killed_between_two_steps_a_run_resumes_bit_for_bit_and_repeats_no_step_before(
    train, copy, straight
):
    run = copy()
    assert (
        len(losses(run)) == 5 and checkpoints(run)[-1] == "checkpoint-4"
    )  # step 5 is trained and logged again
    assert train(trouble="callback@4").returncode == 0
    assert_same(run, straight)
    assert "LookupError" not in json.dumps(events(run))  # the callback did not see step 4 again


def test_killed_inside_a_save_a_run_resumes_from_the_checkpoint_before(train, cpt, run, straight):
    assert train(trouble="save@4").returncode == -signal.SIGKILL
    assert checkpoints(run) == ["checkpoint-2"] and cpt("verify", run).returncode == 0
    assert train().returncode == 0
    assert_same(run, straight)


@pytest.mark.slow
def test_killed_at_any_moment_and_in_its_export_a_run_resumes_bit_for_bit(
    start, train, cpt, file, my_lab, run, straight
):
    draw, last = random.Random(1), run / f"checkpoint-{STEPS}"
    for wait in (draw.uniform(0.2, 1.5), draw.uniform(0.2, 1.5), None, None):
        typed = start("train", file, folder=my_lab)
        while wait is None and typed.process.is_alive() and not last.exists():
            time.sleep(0.01)
        time.sleep(wait or draw.uniform(0, 0.1))
        typed.signal(signal.SIGKILL)
        typed.wait()
        assert not (run / "final").exists() or weights(run) == weights(straight)
    assert train().returncode == 0
    assert_same(run, straight)
    assert cpt("verify", run).returncode == 0


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written_in_the_background_a_run_resumes_bit_for_bit(
    train, run, straight
):
    words = ("checkpoints.in_background=true", "checkpoints.every_steps=1", "checkpoints.keep=null")
    assert train(*words, trouble="kill@6").returncode == -signal.SIGKILL
    assert train(*words).returncode == 0
    assert {"checkpoint-4", "checkpoint-6", "checkpoint-8"} <= {*checkpoints(run)}
    assert_same(run, straight)


def test_before_a_checkpoint_has_its_name_the_disk_has_its_files(
    recipe, write, tmp_path, monkeypatch
):
    """What a power cut could lose: files, the manifest, a name in a folder."""
    monkeypatch.setenv("CPT_CACHE", str(tmp_path / "store"))
    on_disk, published, order = set(), [], []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor):
        fsync(descriptor)
        on_disk.add(os.fstat(descriptor).st_ino)
        order.append(os.fstat(descriptor).st_ino)

    def recorded_rename(source, target, **options):
        if Path(target).name.startswith("checkpoint-"):
            assert (Path(source) / "manifest.json").exists()
            paths = [Path(source), *Path(source).rglob("*")]  # a folder's names are in the folder
            assert len(paths) > 8
            assert [path.name for path in paths if path.stat().st_ino not in on_disk] == []
            published.append(Path(target).name)
            order.append(Path(target).name)
        rename(source, target, **options)

    for name, recorded in {
        "fsync": recorded_fsync,
        "rename": recorded_rename,
        "replace": os.replace,
    }.items():
        monkeypatch.setattr(os, name, recorded)
    train_recipe(load_recipe(write({**recipe, "checkpoints": {"every_steps": 4}})))
    assert published == ["checkpoint-4", "checkpoint-8"]
    run = (tmp_path / "runs/run").stat().st_ino
    assert all(
        order[order.index(name) + 1] == run for name in published
    )  # next the folder with the new name
    stored = [path for path in (tmp_path / "store").rglob("*") if path.suffix in (".bin", ".npy")]
    assert stored and [path.name for path in stored if path.stat().st_ino not in on_disk] == []


def test_the_newest_checkpoints_are_kept_and_those_that_the_recipe_names(recipe, write, corpus):
    recipe["checkpoints"] = {
        "every_tokens": 256,
        "keep": {"last": 2, "every": 4, "best": "eval_held_loss"},
    }
    held_out = [{"path": str(corpus / "held_out.jsonl"), "name": "held"}]
    recipe["evaluation"] = {"every_steps": 1, "perplexity": held_out}
    recipe["schedule"] = {"name": "linear", "warmup_tokens": 1024}
    run = train_recipe(load_recipe(write(recipe))).parent
    lines = metrics(run, having="eval_held_loss")
    figures = {line["step"]: line["eval_held_loss"] for line in lines if line["step"]}
    assert len(figures) == STEPS and min(figures.values()) != figures[1]
    assert {*checkpoints(run)} == {
        f"checkpoint-{step}" for step in (4, 7, 8, min(figures, key=figures.get))
    }


# Signals


def handles_signals(pid: int) -> bool:
    """Whether the process has a handler of SIGTERM."""
    caught = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.fixture
def start_in(start, corpus, tokenizer_folder):
    """Start a run in a folder, with an empty token store; return when its handlers of signals are there."""

    def begin(folder: Path, *overrides: str):
        folder.mkdir()
        file = written(folder / "recipe.yaml", tiny_recipe(corpus, tokenizer_folder, folder))
        store = {"CPT_CACHE": str(folder / "store")}
        typed = start("train", file, *overrides, environment=store)
        typed.wait_until(lambda: handles_signals(typed.pid))
        return typed

    return begin


@pytest.fixture
def interrupt(start_in, tmp_path):
    """Start a run, and signal its group so many seconds after its handlers are there."""

    def begin(seconds: float, number: int, *overrides: str) -> bool:
        """Return whether the signal ended the command."""
        folder = tmp_path / f"{seconds:.4f}"
        typed = start_in(folder, *overrides)
        time.sleep(seconds)
        typed.signal(number)
        is_ended = typed.wait(60).returncode != 0
        state = None
        if (folder / "runs/run/status.json").exists():
            state = status(folder / "runs/run")["state"]
        if is_ended:
            assert typed.returncode == 75, (seconds, number, typed.output)
            assert "Interrupted: " in typed.stderr, typed.output
            assert "Traceback" not in typed.output, typed.output
        # when the run is finished, the command measures and prints the verdict
        is_finished = state == "finished" and (folder / "runs/run/final/config.json").exists()
        assert is_finished or (is_ended and state in (None, "interrupted")), (state, typed.output)
        shutil.rmtree(folder)
        return is_ended

    return begin


@pytest.mark.parametrize("seconds", [0, 0.4, 0.8])
def test_a_signal_around_the_first_step_ends_the_run_in_a_sentence(interrupt, seconds):
    """On a fast machine the last one comes within the training, which is long enough not to have ended."""
    assert interrupt(seconds, signal.SIGINT, "budget.tokens=1_000_000")


@pytest.mark.slow
def test_a_signal_at_any_moment_ends_the_run_in_a_sentence(interrupt, start_in, tmp_path):
    """As many moments as fit into a minute, from the start until the command's end."""
    typed = start_in(tmp_path / "whole")
    begun = time.monotonic()
    assert typed.wait().returncode == 0
    span = time.monotonic() - begun
    ends, moments, num_ended = time.monotonic() + 60, 0, 0
    while time.monotonic() < ends:
        number = (signal.SIGINT, signal.SIGTERM)[moments % 2]
        moment = moments * 0.618 % 1 * span  # spaced evenly, however many there are
        num_ended += interrupt(moment, number)
        moments += 1
    assert num_ended > moments / 2
    print(f"{num_ended} of {moments} signals in {span:.1f} s ended the command")


@pytest.mark.parametrize("kind", ["term", pytest.param("hup", marks=pytest.mark.slow)])
def test_a_signal_ends_the_run_after_a_save_and_it_resumes_bit_for_bit(train, run, straight, kind):
    assert train(trouble=f"{kind}@3").returncode == 75
    saved = int(status(run)["checkpoint"].removeprefix("checkpoint-"))
    assert status(run)["state"] == "interrupted" and saved >= 3 and not (run / "final").exists()
    assert train().returncode == 0
    assert_same(run, straight)


@pytest.mark.slow
def test_an_interrupt_of_the_whole_group_saves_too(start, train, file, my_lab, run, straight):
    typed = start("train", file, "training.dataloader_num_workers=1", folder=my_lab)
    typed.wait_until(lambda: (run / "metrics.jsonl").exists() and losses(run))
    typed.signal(signal.SIGINT)
    assert typed.wait().returncode == 75, typed.output
    assert train().returncode == 0
    assert_same(run, straight)


@pytest.mark.slow
def test_stopped_in_an_evaluation_the_run_makes_it_up(train, run, corpus):
    evaluated = f"evaluation={{perplexity: [{{path: {corpus}/held_out.jsonl}}], every_steps: 2}}"
    assert train(evaluated, "name=whole").returncode == 0
    assert train(evaluated, trouble="term@4").returncode == 75
    assert train(evaluated).returncode == 0
    figures, of_whole = (
        [
            (row["step"], row["eval_held_out_loss"])
            for row in metrics(folder, having="eval_held_out_loss")
        ]
        for folder in (run, run.with_name("whole"))
    )
    assert figures == of_whole and [step for step, _ in figures] == [0, 2, 4, 6, 8]
    assert weights(run) == weights(run.with_name("whole"))


# Damage


def damage(path, how):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    match how:
        case "missing":
            return path.unlink()
        case "cut":
            content = content[:middle]
        case "zeroed":
            content = bytes(len(content))
        case "flipped bit":
            content[middle] ^= 4
    path.write_bytes(content)
    return None


def files_of(checkpoint) -> list[str]:
    return sorted(
        path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()
    )


def test_a_checkpoint_that_was_cut_is_set_aside_with_the_reason_and_the_one_before_is_used(
    train, copy, straight
):
    run = copy()
    damage(run / "checkpoint-4/model.safetensors", "cut")
    assert train().returncode == 0
    assert_same(run, straight)
    assert "model.safetensors" in (run / "bad-checkpoint-4/reason.txt").read_text()
    assert events(run)[-1]["kind"] == "quarantined"


@pytest.mark.slow
def test_any_damage_to_any_file_of_a_checkpoint_is_found(cpt, copy):
    run = copy()
    names = files_of(run / "checkpoint-4")
    assert len(names) >= 12 and cpt("verify", run / "checkpoint-4").returncode == 0
    for name in names:
        path = run / "checkpoint-4" / name
        content = path.read_bytes()
        for how in DAMAGES:
            damage(path, how)
            typed = cpt("verify", run / "checkpoint-4")
            assert typed.returncode == 2, (name, how, typed.output)
            path.write_bytes(content)


def test_a_run_without_an_intact_checkpoint_stops_and_restarts_only_with_the_option(
    train, copy, straight
):
    run = copy()
    for checkpoint in checkpoints(run):
        damage(run / checkpoint / "optimizer.pt", "flipped bit")
    refused = train()
    assert (
        refused.returncode == 2
        and "--allow-restart" in refused.stderr
        and "optimizer.pt" in refused.stderr
    )
    assert train("--allow-restart").returncode == 0
    assert_same(run, straight)


@pytest.mark.slow
def test_a_checkpoint_can_be_chosen_and_what_was_newer_is_kept_aside(train, copy, straight):
    run = copy()
    assert train("--resume", run / "checkpoint-2").returncode == 0
    assert_same(run, straight)
    assert list((run / "set-aside").rglob("checkpoint-4"))


def test_a_checkpoint_with_another_manifest_or_more_weights_is_refused(cpt, copy):
    checkpoint = copy() / "checkpoint-4"
    manifest = (checkpoint / "manifest.json").read_text()
    (checkpoint / "manifest.json").write_text(manifest.replace('"tokens": 1', '"tokens": 2'))
    assert cpt("verify", checkpoint).returncode == 2
    (checkpoint / "manifest.json").write_text(manifest)
    assert cpt("verify", checkpoint).returncode == 0
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "model-00002-of-00002.safetensors")
    assert cpt("verify", checkpoint).returncode == 2


def test_a_checkpoint_that_lacks_the_optimizers_state_is_not_resumed_from(train, copy, tmp_path):
    theirs = shutil.copytree(copy() / "checkpoint-4", tmp_path / "theirs/checkpoint-4")
    (theirs / "manifest.json").unlink()
    (theirs / "optimizer.pt").unlink()
    refused = train("--resume", theirs, "name=other")
    assert refused.returncode == 2 and "optimizer.pt" in refused.stderr


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth"])
def test_a_program_planted_in_a_checkpoint_never_runs(train, copy, tmp_path, name):
    theirs = shutil.copytree(copy() / "checkpoint-4", tmp_path / "theirs/checkpoint-4")
    (theirs / "manifest.json").unlink()  # a checkpoint that anybody may have written
    if name == "optimizer.pt":
        state = torch.load(theirs / name, weights_only=True)
        torch.save({**state, "passenger": Planted(tmp_path / "ran")}, theirs / name)
    else:
        (theirs / name).write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    refused = train("--resume", theirs, "name=other")
    assert (
        refused.returncode == 2
        and "checkpoint-4" in refused.stderr
        and not (tmp_path / "ran").exists()
    )


# Bad steps


ROWS = 4  # of a step


@pytest.fixture
def weights_by_hand(file, my_lab, monkeypatch):
    """The weights after the updates of these steps' rows, in a loop of plain torch; None makes no update."""
    monkeypatch.syspath_prepend(my_lab)

    def train_on(steps: list[int | None], *words: str) -> dict[str, torch.Tensor]:
        trainer, _, _ = trainer_of(file, [*NO_DROPOUT, f"output_dir={my_lab}/by_hand", *words])
        trainer.create_optimizer_and_scheduler(STEPS)
        model = trainer.model.train()
        for step in steps:
            if step is not None:
                rows = [trainer.rows[number] for number in range(ROWS * (step - 1), ROWS * step)]
                model(**torch.utils.data.default_collate(rows)).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
            trainer.lr_scheduler.step()
        return model.state_dict()

    return train_on


def assert_weights(run, expected) -> None:
    """An update that is missing or one too many changes weights by a thousandth and more."""
    found = load_file(run / "final/model.safetensors")
    for name, value in found.items():
        assert torch.allclose(value, expected[name], rtol=0, atol=2e-5), (
            f"{name} differs by {(value - expected[name]).abs().max():.1g}"
        )


@pytest.mark.parametrize(
    "optimizer", ["adamw", "my_lab:adamw"]
)  # skips on the device or on the host
def test_the_updates_of_bad_steps_are_missing_and_no_others(train, run, weights_by_hand, optimizer):
    words = (*NO_DROPOUT, f"optimizer.name={optimizer}")
    assert train(*words, trouble="nan@3 spike@7").returncode == 0
    assert [(event["kind"], event["step"], event["rows"]) for event in events(run)] == [
        ("nan_skipped", 3, [8, 12]),
        ("spike_skipped", 7, [24, 28]),
    ]
    assert_weights(run, weights_by_hand([1, 2, None, 4, 5, 6, None, 8], *words))
    assert len(losses(run)) == STEPS


def test_a_first_step_of_absurd_loss_is_skipped(train, run, weights_by_hand):
    words = (*NO_DROPOUT, "budget.tokens=768")
    assert train(*words, trouble="spike@1").returncode == 0
    assert_weights(run, weights_by_hand([None, 2, 3], *words))
    assert [(event["kind"], event["step"]) for event in events(run)] == [("spike_skipped", 1)]


def test_weights_that_are_not_finite_are_not_saved(train, run):
    refused = train(trouble="weights@7")
    assert refused.returncode == 2, refused.output
    assert checkpoints(run) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert not (run / "final").exists()


@pytest.mark.slow
def test_after_too_many_bad_steps_a_run_goes_back_and_leaves_their_rows_out(
    train, run, my_lab, weights_by_hand
):
    guard = "safety.loss_guard={name: robust, skips: 1}"
    assert train(*NO_DROPOUT, guard, seen_in(my_lab), trouble="nan@4,6").returncode == 0
    assert [event["kind"] for event in events(run)] == [
        "nan_skipped",
        "nan_skipped",
        "rolled_back",
        "set_aside",
    ]
    assert events(run)[2]["to_step"] == 2
    lines = [json.loads(line)["rows"] for line in (my_lab / "seen.jsonl").read_text().splitlines()]
    steps = [
        {*one, *other} for one, other in zip(lines[::2], lines[1::2], strict=True)
    ]  # two micro-batches each
    first, again = steps[:6], steps[6:]
    assert len(again) == 6 and again[:2] == [first[2], first[4]]
    assert not (first[3] | first[5]) & set().union(*again)
    assert len(losses(run)) == STEPS
    assert_weights(run, weights_by_hand([1, 2, 3, 5, 7, 8, 9, 10]))


def test_a_run_that_diverged_too_often_ends(train, run):
    guard = "safety.loss_guard={name: robust, skips: 0, rollbacks: 0}"
    refused = train(guard, trouble="nan@3")
    assert refused.returncode == 2 and "diverged: steps 3 were skipped" in refused.stderr
    assert status(run)["state"] == "failed" and not (run / "final").exists()


@pytest.mark.slow
def test_out_of_memory_makes_micro_batches_smaller_and_the_same_steps(train, run, my_lab):
    # Dropout draws other numbers in other micro-batches.
    assert train(*NO_DROPOUT, seen_in(my_lab), trouble="memory@3").returncode == 0
    assert train(*NO_DROPOUT, "name=whole").returncode == 0
    assert [event["kind"] for event in events(run)] == ["out_of_memory"]
    assert losses(run) == pytest.approx(losses(run.with_name("whole")), rel=1e-5)
    whole, halves = [2, 2], [1, 1, 1, 1]
    assert sizes_in(my_lab) == {1: whole, 2: whole, **dict.fromkeys(range(3, STEPS + 1), halves)}


def seen_in(folder) -> str:
    """Callbacks that make trouble and write down each micro-batch."""
    seen = f"{{name: 'my_lab:Seen', file: {folder}/seen.jsonl}}"
    return f"monitoring.callbacks=[{{name: 'my_lab:Trouble'}}, {seen}]"


def sizes_in(folder) -> dict[int, list[int]]:
    """The rows of each micro-batch that trained, by step, in a fixed order."""
    sizes: dict[int, list[int]] = {}
    for line in map(json.loads, (folder / "seen.jsonl").read_text().splitlines()):
        sizes.setdefault(line["step"], []).append(len(line["rows"]))
    return {step: sorted(of_step) for step, of_step in sizes.items()}


# The user's own code


@pytest.mark.slow
def test_a_data_worker_that_dies_is_replaced_and_no_row_is_lost(train, run, straight):
    assert train("training.dataloader_num_workers=1", trouble="worker@3").returncode == 0
    assert_same(run, straight)


def test_a_run_whose_files_have_changed_is_not_resumed(cpt, recipe, write, my_lab, corpus, run):
    own = shutil.copy(corpus / "domain.jsonl", my_lab / "own.jsonl")
    recipe["data"]["sources"] = [{"path": str(own)}]
    recipe |= {
        "checkpoints": {"every_steps": 2},
        "monitoring": {"callbacks": [{"name": "my_lab:Trouble"}]},
    }
    file = write(recipe)
    assert cpt("train", file, folder=my_lab, environment={"TROUBLE": "term@3"}).returncode == 75
    with own.open("a") as documents:
        documents.write('{"text": "one more document"}\n')
    refused = cpt("train", file, folder=my_lab)
    assert refused.returncode == 2 and "began with other" in refused.stderr
    (run / "inputs.json").unlink()  # the checkpoint knows its data, too
    refused = cpt("train", file, folder=my_lab)
    assert (
        refused.returncode == 2
        and "Traceback" not in refused.stderr
        and not (run / "final").exists()
    )


# The disk


@pytest.fixture
def disk(my_lab):
    """A small disk for the runs."""
    (folder := my_lab / "runs").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder]).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder) -> Path:
    with suppress(OSError), (folder / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(1 << 12))
    return folder / "ballast"


@pytest.mark.slow
def test_a_full_disk_costs_no_checkpoint_and_the_run_resumes_when_space_is_free_again(
    start, train, file, my_lab, disk, run, straight
):
    typed = start("train", file, folder=my_lab)
    typed.wait_until(lambda: (run / "checkpoint-2").exists())
    ballast = fill(disk)
    assert typed.wait().returncode in (0, 2) and "Traceback" not in typed.stderr
    ballast.unlink()
    assert (
        train().returncode == 0
        and weights(run) == weights(straight)
        and losses(run) == losses(straight)
    )


# Several processes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_failed_saves_of_two_processes_end_both_after_a_last_try_in_the_archive(
    together, file, my_lab, disk, run, of_two
):
    words = ("train", file, *NO_DROPOUT, "checkpoints.max_failed_saves=2")
    words += ("checkpoints.every_steps=1", f"checkpoints.archive={my_lab}/archive")
    both = together(2, *words, folder=my_lab, environment={"TROUBLE": "full@3"})
    assert [one.wait().returncode for one in both] == [2, 2], both[0].output
    archived = my_lab / "archive/run/checkpoint-5"
    assert "step 5 could not be saved" in both[0].stderr and str(archived) in both[0].stderr
    assert checkpoints(run)[-1] == "checkpoint-3"
    (disk / "ballast").unlink()
    shutil.copytree(archived, run / "checkpoint-5")
    for one in together(2, *words, folder=my_lab):
        assert one.wait().returncode == 0, one.output
    assert_same(run, of_two)


@pytest.mark.slow
def test_two_processes_then_one_then_two_make_the_same_steps(
    together, train, file, my_lab, run, of_two
):
    for one in together(
        2, "train", file, *NO_DROPOUT, folder=my_lab, environment={"TROUBLE": "term@3"}
    ):
        assert one.wait().returncode == 75
    assert train(*NO_DROPOUT, trouble="term@7").returncode == 75
    for one in together(2, "train", file, *NO_DROPOUT, folder=my_lab):
        assert one.wait().returncode == 0
    assert losses(run) == pytest.approx(losses(of_two), rel=2e-6) and len(losses(run)) == STEPS


@pytest.mark.slow
def test_two_processes_measure_each_held_out_row_once(together, train, file, my_lab, run):
    """Five documents of unequal length and loss, so that a row more or less would change each figure."""
    lengths = (1, 2, 3, 5, 2)
    texts = [
        f"{number} " + "the model reads a word " * times for number, times in enumerate(lengths)
    ]
    held_out = write_texts(my_lab / "held.jsonl", texts)
    words = (
        f"evaluation={{perplexity: [{{path: {held_out}}}]}}",
        "data.packing=none",
        "budget.tokens=256",
        "training.per_device_eval_batch_size=1",
        *NO_DROPOUT,
    )
    for one in together(2, "train", file, *words, folder=my_lab):
        assert one.wait().returncode == 0, one.output
    assert train(*words, "name=alone").returncode == 0
    by_two, alone = (
        metrics(folder, having="eval_held_tokens") for folder in (run, run.with_name("alone"))
    )
    assert [row["step"] for row in by_two] == [row["step"] for row in alone] == [0, 1]
    for one, other in zip(by_two, alone, strict=True):
        figures = {name: value for name, value in other.items() if name.startswith("eval_held_")}
        assert {"eval_held_loss", "eval_held_bits_per_byte"} <= figures.keys()
        assert {name: one[name] for name in figures} == pytest.approx(figures, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_where_one_of_two_processes_dies_the_other_ends_and_the_run_resumes(
    together, file, my_lab, run, of_two
):
    words = ("train", file, *NO_DROPOUT)
    first, last = together(2, *words, folder=my_lab, environment={"TROUBLE": "kill/1@5"})
    assert last.wait().returncode == -signal.SIGKILL and first.wait(120).returncode > 0
    for one in together(2, *words, folder=my_lab):
        assert one.wait().returncode == 0
    assert_same(run, of_two)


@pytest.fixture
def both(together, file, my_lab):
    """Train on two processes with trouble or without; returns their exit codes."""

    def begin(*words, trouble=""):
        typed = together(
            2, "train", file, *NO_DROPOUT, *words, folder=my_lab, environment={"TROUBLE": trouble}
        )
        return [one.wait().returncode for one in typed]

    return begin


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_out_of_memory_on_one_process_makes_the_micro_batches_of_both_smaller(
    both, run, of_two, my_lab
):
    seen = seen_in(my_lab)
    assert both(seen, trouble="memory/1@3") == [76, 76] and both(seen) == [0, 0]
    whole, halves = [2, 2], [1, 1, 1, 1]
    sizes = sizes_in(my_lab)
    assert sizes.pop(3) == [*halves, 2], "of the first process, before it knew"
    assert sizes == {1: whole, 2: whole, **dict.fromkeys(range(4, STEPS + 1), halves)}
    assert losses(run) == pytest.approx(losses(of_two), rel=1e-5)
    assert [event["kind"] for event in events(run)] == ["out_of_memory"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bad_steps_of_one_process_are_skipped_by_both_and_both_go_back(both, run, weights_by_hand):
    guard = "safety.loss_guard={name: robust, skips: 1}"
    assert both(guard, trouble="nan/1@4,6") == [76, 76] and both(guard) == [0, 0]
    kinds = [(event["kind"], event["step"]) for event in events(run)]
    assert (
        kinds[:3] == [("nan_skipped", 4), ("nan_skipped", 6), ("rolled_back", 6)]
        and len(losses(run)) == STEPS
    )
    assert_weights(run, weights_by_hand([1, 2, 3, 5, 7, 8, 9, 10]))
    assert both("safety.on_spike=my_lab:asked_of_the_first", "name=asked", trouble="nan/1@3,5") == [
        0,
        0,
    ]
    asked = run.with_name("asked")
    assert [(event["kind"], event["step"]) for event in events(asked)] == [
        ("nan_skipped", 3),
        ("nan_skipped", 5),
    ]
    assert_weights(asked, weights_by_hand([1, 2, None, 4, None, 6, 7, 8]))


def zero_profile(folder, stage) -> str:
    profile = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    profile |= {
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": stage,
            "stage3_gather_16bit_weights_on_model_save": stage == 3,
        },
    }
    (folder / "zero.json").write_text(json.dumps(profile))
    return f"training.deepspeed={folder}/zero.json"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "engine",
    [
        "ddp",
        pytest.param(2, marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.long) for name in (3, "fsdp")),
    ],
)
def test_an_error_of_all_processes_in_a_step_saves_the_step_before(
    together, file, my_lab, run, tmp_path, engine
):
    """Dropout draws a micro-batch's numbers before the error."""
    words = ["train", file, "training.per_device_train_batch_size=1"]
    if engine == "fsdp":
        words.append("training.fsdp=true")
    elif engine != "ddp":
        words.append(zero_profile(tmp_path, engine))
    for one in together(2, *words, "name=whole", folder=my_lab):
        assert one.wait().returncode == 0, one.output
    trouble = {"TROUBLE": "backward@6 backward/1@6"}
    for one in together(2, *words, folder=my_lab, environment=trouble):
        assert one.wait().returncode == 1, one.output
    assert status(run)["checkpoint"] == "checkpoint-5"
    assert "resumes from checkpoint-5" in events(run)[-1]["message"]
    for one in together(2, *words, folder=my_lab):
        assert one.wait().returncode == 0, one.output
    assert_same(run, run.with_name("whole"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_process_ends_both_and_says_why_nothing_is_saved(
    together, file, my_lab, run, rank
):
    trouble = {"TROUBLE": "backward@6" if rank == 0 else "backward/1@6"}
    both = together(2, "train", file, folder=my_lab, environment=trouble)
    assert [one.wait(120).returncode for one in both][rank] == 1
    reason = f"Step 5 could not be saved: process {1 - rank} did not fail within 30 s"
    assert reason in both[rank].output and "resumes from checkpoint-4" in both[rank].output
    assert "LookupError: of the user" in both[1 - rank].output
    assert checkpoints(run) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [2, 3])
def test_under_zero_updates_and_the_logged_loss_are_those_of_the_steps_that_counted(
    both, run, my_lab, tmp_path, stage, weights_by_hand
):
    for trouble, kind, bad in (("spike/1@3", "spike_skipped", 3), ("nan/1@6", "nan_skipped", 6)):
        for name, words in (("plain", []), ("zero", [zero_profile(tmp_path, stage)])):
            words = [f"name={name}", "training.logging_steps=4", *words]
            assert both(*words, trouble=trouble) == [0, 0]
            for once in my_lab.glob("trouble-*"):
                once.unlink()
        expected = losses(run.with_name("plain"))
        assert losses(run.with_name("zero")) == pytest.approx(expected, rel=1e-3)
        assert max(expected) < 10
        counted = [None if step == bad else step for step in range(1, STEPS + 1)]
        assert_weights(run.with_name("zero"), weights_by_hand(counted))
        (event,) = events(run.with_name("zero"))
        assert (event["kind"], event["step"]) == (kind, bad)
        for name in ("plain", "zero"):
            shutil.rmtree(run.with_name(name))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_signal_to_one_of_two_processes_in_an_evaluation_ends_both_and_they_make_it_up(
    both, run, of_two, corpus
):
    evaluated = f"evaluation={{perplexity: [{{path: {corpus}/held_out.jsonl}}], every_steps: 2}}"
    assert both(evaluated, trouble="term/1@4") == [75, 75] and both(evaluated) == [0, 0]
    assert [row["step"] for row in metrics(run, having="eval_held_out_loss")] == [0, 2, 4, 6, 8]
    assert losses(run) == losses(of_two)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_supervised_run_restarts_after_a_kill(train, run, straight):
    assert train("--supervise", trouble="kill@5").returncode == 0
    assert_same(run, straight)
    assert "restart" in [event["kind"] for event in events(run)]
