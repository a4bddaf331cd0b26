"""Changes of a started run's recipe: what is accepted at which step, and what the history records of it."""

import json
import shutil

import pytest
from run_folders import write_lines
from tiny_run import damage, save_checkpoint, seal
from transformers import TrainerControl, TrainerState

from cpt.checkpoints.manifest import read_manifest
from cpt.checkpoints.resume import ResumePoint
from cpt.errors import CheckpointError, RecipeError, RestartNeeded
from cpt.recipe.schema import Recipe
from cpt.runs.history import RecipeRecord, read_history, read_record, write_record
from cpt.runs.record import Run
from cpt.training.changes import EndOfPart, RecipeChanges, propose

STABLE = {"name": "wsd", "decay_tokens": 512, "warmup_tokens": 256}
INFINITE = {"name": "infinite", "warmup_tokens": 256, "cooldown_tokens": 512, "anneal_tokens": 512}
UNSTATED = {"budget": {"tokens": 2560}}  # its global batch follows from the other keys
SOURCES = [
    {"path": "a.jsonl", "name": "a", "weight": 0.75},
    {"path": "b.jsonl", "name": "b", "weight": 0.25},
]


def recipe_in(folder, name="run", **changes):
    """10 steps of 4 rows."""
    sections = {
        "name": name,
        "output_dir": str(folder),
        "stage": "cpt",
        "model": {"path": "some/model"},
        "data": {"sources": SOURCES, "sequence_length": 64},
        "budget": {"tokens": 2560, "global_batch_tokens": 256},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": STABLE,
        **changes,
    }
    return Recipe.model_validate(sections)


@pytest.fixture
def first(tmp_path):
    return recipe_in(tmp_path)


@pytest.fixture
def folder(first, tmp_path):
    """A run with checkpoints of steps 3, 5 and 7, which knows where they stand in the data."""
    run = tmp_path / "run"
    write_lines_in(run, 9)
    write_record(run, RecipeRecord(first, []))
    for step in (3, 5, 7):
        save_checkpoint(run, step, sealed=False)
        write_position(run / f"checkpoint-{step}", step, position_at(step))
    return run


def position_at(step):
    of_sources = {
        name: {"rows": rows * step, "fingerprint": name} for name, rows in (("a", 3), ("b", 1))
    }
    return {"row": 4 * step, "positions": of_sources, "fingerprint": f"f{step}"}


def write_lines_in(run, steps):
    (run / "held_out").mkdir(parents=True)
    for step in (0, 4, 6):
        (run / "held_out" / f"step-{step}.npz").write_text(f"losses {step}")
    write_lines(run / "metrics.jsonl", [{"step": step, "loss": 1.0} for step in range(1, steps)])
    write_lines(run / "samples.jsonl", [{"step": step} for step in (0, 5, 6)])


def write_position(checkpoint, step, position):
    (checkpoint / "manifest.json").unlink(missing_ok=True)
    (checkpoint / "data_position.json").write_text(json.dumps(position))
    seal(checkpoint, step)


def point_of(folder, step):
    checkpoint = folder / f"checkpoint-{step}"
    return ResumePoint(checkpoint, read_manifest(checkpoint))


def start(recipe, folder, step, **how):
    """Return whether the run changes, and its next part; the history is written."""
    changes = RecipeChanges(recipe, accept=True, **how)
    is_changed = changes.check(folder)
    run = Run(folder)
    part = changes.part(run, point_of(folder, step))
    changes.record(run)
    return is_changed, part


def test_a_change_is_recorded_with_all_that_held_until_it(folder, first, tmp_path):
    second = recipe_in(tmp_path, optimizer={"learning_rate": 5e-4}, seed=first.seed)
    is_changed, part = start(second, folder, 7, note="slower")
    assert is_changed and (part.recipe, part.end, part.stretches) == (second, None, [])
    (line,) = read_history(folder)
    assert line.pop("time").endswith("+00:00")
    change = {"key": "optimizer.learning_rate", "kind": "from_step", "before": 1e-3, "after": 5e-4}
    assert line == {
        "step": 7,
        **position_at(7),
        "note": "slower",
        "changes": [change],
        "new_stretch": False,
        "recipe": first.model_dump(mode="json", by_alias=True),
        "inputs": {},
        "from": None,
    }
    assert read_record(folder).recipe == second
    assert start(second, folder, 7)[0] is False and len(read_history(folder)) == 1


def test_another_mixture_begins_a_stretch_and_needs_the_position_of_the_data(folder, tmp_path):
    sources = [{**SOURCES[0], "weight": 0.5}, SOURCES[1]]
    second = recipe_in(tmp_path, data={"sources": sources, "sequence_length": 64})
    _, part = start(second, folder, 7)
    (line,) = read_history(folder)
    assert line["new_stretch"] is True and part.stretches == [line]
    write_position(folder / "checkpoint-7", 7, {"row": 28})
    third = recipe_in(tmp_path, data={"sources": SOURCES, "sequence_length": 64})
    with pytest.raises(CheckpointError, match="lacks the position"):
        start(third, folder, 7)


def test_a_run_that_goes_back_drops_later_changes_and_one_that_repeats_keeps_them(
    folder, first, tmp_path
):
    second = recipe_in(tmp_path, optimizer={"learning_rate": 5e-4})
    start(second, folder, 5)
    (line,) = read_history(folder)
    assert line["step"] == 5
    repeated = shutil.copytree(folder, tmp_path / "copy" / "run")
    for step in (5, 7):
        shutil.rmtree(repeated / f"checkpoint-{step}")
    is_changed, part = start(second, repeated, 3)
    assert is_changed is False and read_history(repeated) == [line]
    assert (part.recipe, part.end) == (first, 5), "step 4 and 5 as they were"
    shutil.copytree(folder, tmp_path / "back")
    is_changed, part = start(second, folder, 3, resume=folder / "checkpoint-3")
    assert is_changed is True and [line["step"] for line in read_history(folder)] == [3]
    assert (part.recipe, part.end) == (second, None)
    is_changed, part = start(second, tmp_path / "back", 7, resume=tmp_path / "back/checkpoint-7")
    assert is_changed is False and [one["step"] for one in read_history(tmp_path / "back")] == [5]


def test_a_branch_takes_what_was_measured_until_its_step_once(folder, tmp_path):
    branch, checkpoint = tmp_path / "branch", folder / "checkpoint-5"
    recipe = recipe_in(tmp_path, "branch", optimizer={"learning_rate": 5e-4})
    branch.mkdir()
    changes = RecipeChanges(recipe, accept=True, branch_of=checkpoint)
    assert changes.check(branch) is True
    part = changes.part(Run(branch), point_of(folder, 5))
    changes.record(Run(branch))
    assert part.recipe == recipe
    (line,) = read_history(branch)
    assert (line["step"], line["from"]) == (5, str(checkpoint))
    assert [one["key"] for one in line["changes"]] == ["optimizer.learning_rate"]
    steps = {
        name: [json.loads(text)["step"] for text in (branch / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "samples.jsonl")
    }
    assert steps == {"metrics.jsonl": [1, 2, 3, 4, 5], "samples.jsonl": [0, 5]}
    kept = sorted(path.name for path in (branch / "held_out").iterdir())
    assert kept == ["step-0.npz", "step-4.npz"]
    write_lines(branch / "metrics.jsonl", [{"step": 6}])
    changes.record(Run(branch))
    assert (branch / "metrics.jsonl").read_text() == '{"step": 6}\n', "of the branch itself"


def test_a_start_that_begins_anew_has_an_empty_history(folder, first, tmp_path):
    second = recipe_in(tmp_path, seed=5)
    (folder / "inputs.json").write_text("{}")
    changes = RecipeChanges(second, resume="none")
    assert changes.check(folder) is True
    assert changes.part(Run(folder), point_of(folder, 5)).recipe == second
    assert changes.are_new
    changes.record(Run(folder))
    assert read_record(folder).recipe == second and read_history(folder) == []
    assert not (folder / "inputs.json").exists()
    assert not RecipeChanges(second).are_new


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 5}, "`seed`"),
        (
            {"budget": {"tokens": 1792, "global_batch_tokens": 256}},
            "has trained 1,792 tokens already",
        ),
        ({"budget": {"tokens": 2560, "global_batch_tokens": 512}}, "512 tokens instead of 256"),
        ({"schedule": {**STABLE, "decay_tokens": 1024}}, "decay would begin or end in the past"),
        ({"optimizer": {"learning_rate": 1e-4}}, None),
        ({"budget": {"tokens": 4096, "global_batch_tokens": 256}}, None),
        ({"schedule": {**STABLE, "decay_tokens": 768}}, None),
        ({"schedule": {"name": "cosine"}}, None),
        ({"schedule": INFINITE}, None),  # of another shape, so it may jump
        ({"training": {"per_device_train_batch_size": 2}}, None),
        ({**UNSTATED, "training": {"per_device_train_batch_size": 3}}, "192 tokens instead of 256"),
        ({**UNSTATED, "training": {"per_device_train_batch_size": 4}}, None),
        (
            {
                **UNSTATED,
                "training": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            },
            None,
        ),
    ],
)
def test_a_change_is_refused_where_the_run_cannot_follow_it(changes, said, folder, tmp_path):
    found = propose(recipe_in(tmp_path, **changes), folder, folder / "checkpoint-7")
    if said is None:
        found.check()
    else:
        with pytest.raises(RecipeError, match=said):
            found.check()


def test_a_change_is_shown_with_its_first_step_and_the_learning_rate(folder, tmp_path):
    budget = {"tokens": 5120, "global_batch_tokens": 256}
    found = propose(recipe_in(tmp_path, budget=budget), folder, folder / "checkpoint-7")
    assert str(found).splitlines() == [
        f"{folder} changes from step 8 on:",
        "  budget.tokens: 2560 -> 5120",
        "Learning rate, 0 to 0.001, over 5,120 tokens:",
        "  before ▂▄▇█████████████████████▆▄▃▂▂▁                              ",
        "  after  ▂▄▇███████████████████████████████████████████████████▆▄▃▂▂▁",
        f"         {' ' * 21}^ step 7",
    ]


def test_a_part_ends_at_its_last_step_and_the_run_restarts_there_only():
    for step, is_end in ((6, False), (7, True), (8, False)):
        part, control = EndOfPart(7), TrainerControl()
        part.on_step_end(None, TrainerState(global_step=step), control)
        assert (control.should_save, control.should_training_stop) == (is_end, is_end)
        if is_end:
            with pytest.raises(RestartNeeded, match="after step 7"):
                part.restart_at_end()
        else:
            part.restart_at_end()


def test_a_run_of_epochs_is_as_long_as_its_status_says(folder, tmp_path):
    write_record(folder, RecipeRecord(recipe_in(tmp_path, budget={"epochs": 2}), []))
    (folder / "status.json").write_text('{"steps": 10}')

    def totals(**budget):
        found = propose(recipe_in(tmp_path, budget=budget), folder, folder / "checkpoint-5")
        return found.totals

    assert totals(epochs=3) == (2560, 3840)
    assert totals(tokens=5120) == (2560, 5120)
    (folder / "status.json").unlink()
    assert totals(epochs=3) == (None, None)


def test_new_held_out_sets_are_reported_to_come_after_what_was_read(folder, tmp_path):
    evaluation = {"perplexity": [{"path": "held_out.jsonl"}]}
    found = propose(recipe_in(tmp_path, evaluation=evaluation), folder, folder / "checkpoint-7")
    assert str(found).endswith("keep documents of new held-out sets: take other texts.")


@pytest.mark.parametrize(
    ("name", "how", "kind", "named"),
    [
        ("branch", {"branch_of": "run/checkpoint-6"}, CheckpointError, "no such folder"),
        ("run", {"branch_of": "run/checkpoint-5"}, RecipeError, "which did not begin from"),
        ("new", {"resume": "run/checkpoint-5"}, RecipeError, "--from-checkpoint"),
        ("run", {}, RecipeError, r"2560 -> 5120\n(.*\n)+.*--change .and --note REASON"),
        ("run", {"accept": lambda text: False}, RecipeError, "was not accepted"),
    ],
)
def test_a_start_that_is_not_what_was_meant_is_refused(name, how, kind, named, folder, tmp_path):
    paths = {
        key: tmp_path / value if isinstance(value, str) else value for key, value in how.items()
    }
    budget = {"tokens": 5120, "global_batch_tokens": 256}
    changes = RecipeChanges(recipe_in(tmp_path, name, budget=budget), **paths)
    with pytest.raises(kind, match=named):
        changes.check(tmp_path / name)
    assert read_history(folder) == []


def test_a_change_is_asked_for_with_what_it_changes(folder, tmp_path):
    asked = []
    second = recipe_in(tmp_path, budget={"tokens": 5120, "global_batch_tokens": 256})

    def accept(text):
        asked.append(text)
        return True

    assert RecipeChanges(second, accept=accept).check(folder) is True
    (text,) = asked
    assert text.startswith(f"{folder} changes from step 8 on:")


def test_a_note_without_a_change_is_reported(folder, first, capsys):
    assert RecipeChanges(first, note="why").check(folder) is False
    assert "--note: the recipe has no new change" in capsys.readouterr().out
    assert RecipeChanges(first).check(folder) is False
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("asks", [True, False])
def test_a_run_whose_recipe_is_lost_takes_another_only_if_it_is_accepted(
    answer, asks, folder, first
):
    for name in ("record.json", "recipe.yaml"):
        (folder / name).unlink()
    asked = []

    def accept(text):
        asked.append(text)
        return answer

    changes = RecipeChanges(first, accept=accept if asks else answer)
    if answer:
        assert changes.check(folder) is True
    else:
        with pytest.raises(
            RecipeError, match=f"{folder}: recipe.yaml or .*lost or damaged.*--change"
        ):
            changes.check(folder)
    assert len(asked) == asks and all("lost or damaged" in text for text in asked)


def free_change(folder, first):
    """The recipe of the run with another number of checkpoints to keep, which changes no step."""
    return first.model_copy(
        update={"checkpoints": first.checkpoints.model_copy(update={"keep": 7})}
    )


def test_a_free_change_is_recorded_without_being_asked_for(folder, first):
    changes = RecipeChanges(free_change(folder, first), accept=False)
    assert changes.check(folder) is False
    part = changes.part(Run(folder), point_of(folder, 7))
    assert part.recipe.checkpoints.keep == 7
    changes.record(Run(folder))
    (line,) = read_history(folder)
    assert [(one["key"], one["kind"]) for one in line["changes"]] == [("checkpoints.keep", "free")]
    assert line["new_stretch"] is False


def test_a_free_change_leaves_a_later_change_where_it_was(folder, first, tmp_path):
    second = recipe_in(tmp_path, optimizer={"learning_rate": 5e-4})
    start(second, folder, 5)
    third = free_change(folder, second)
    proposal = propose(third, folder, folder / "checkpoint-3")
    assert [change.key for change in proposal.changes] == ["checkpoints.keep"]
    assert proposal.after.optimizer.learning_rate == 1e-3 and not proposal.drops_later
    for step in (5, 7):
        shutil.rmtree(folder / f"checkpoint-{step}")
    changes = RecipeChanges(third, accept=False)
    assert changes.check(folder) is False
    part = changes.part(Run(folder), point_of(folder, 3))
    assert (part.end, part.recipe.optimizer.learning_rate) == (5, 1e-3)
    changes.record(Run(folder))
    assert [line["step"] for line in read_history(folder)] == [3, 5]


def test_a_run_without_a_record_or_a_difference_has_nothing_to_propose(folder, first, tmp_path):
    (tmp_path / "empty").mkdir()
    assert propose(first, tmp_path / "empty", None) is None
    assert propose(first, folder, folder / "checkpoint-7") is None
    assert propose(first, folder, folder / "checkpoint-7", goes_back=True) is None
    assert propose(first, folder, folder / "checkpoint-7", is_branch=True).changes == []
    beginning = propose(recipe_in(tmp_path, seed=5), folder, None)
    assert (beginning.step, beginning.trained_tokens, beginning.manifest) == (0, 0, None)


def test_a_checkpoint_of_another_program_has_no_manifest_to_compare_with(folder, tmp_path):
    (folder / "checkpoint-7" / "manifest.json").unlink()
    batch = {"tokens": 2560, "global_batch_tokens": 512}
    proposal = propose(recipe_in(tmp_path, budget=batch), folder, folder / "checkpoint-7")
    assert (proposal.manifest, proposal.step) == (None, 7)
    assert list(proposal.problems_of_batch()) == []


@pytest.mark.parametrize(
    ("after", "processes", "tokens", "said"),
    [
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, 1, 300, None),
        ({"per_device_train_batch_size": 2}, 1, 300, "128 tokens instead of 300"),
        ({"per_device_train_batch_size": 5}, 1, 320, None),
        ({"per_device_train_batch_size": 5}, 3, 960, None),
        ({"per_device_train_batch_size": 5}, 3, 320, None),  # as the one process that wrote it
        ({"per_device_train_batch_size": 5}, 3, 640, "tokens instead of 640"),
        ({"gradient_accumulation_steps": 3}, 1, 256 * 6, None),  # of 8 rows, which is the default
    ],
)
def test_without_a_stated_batch_the_rows_of_a_step_are_compared(
    after, processes, tokens, said, folder, tmp_path, monkeypatch
):
    before = recipe_in(tmp_path, **UNSTATED, training={"per_device_train_batch_size": 4})
    write_record(folder, RecipeRecord(before, []))
    (folder / "checkpoint-7" / "manifest.json").unlink()
    seal(folder / "checkpoint-7", 7, tokens=7 * tokens)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    proposal = propose(
        recipe_in(tmp_path, **UNSTATED, training=after), folder, folder / "checkpoint-7"
    )
    problems = list(proposal.problems_of_batch())
    assert problems == [] if said is None else said in problems[0]


def test_a_branch_that_has_begun_is_compared_with_itself(folder, tmp_path, capsys):
    branch = tmp_path / "branch"
    checkpoint = folder / "checkpoint-5"
    recipe = recipe_in(tmp_path, "branch", optimizer={"learning_rate": 5e-4})
    branch.mkdir()
    changes = RecipeChanges(recipe, accept=True, branch_of=checkpoint)
    changes.check(branch)
    assert (
        f"{branch} continues {folder} from step 5, with these changes:" in capsys.readouterr().out
    )
    changes.part(Run(branch), point_of(folder, 5))
    changes.record(Run(branch))
    (branch / "began_from.json").write_text(json.dumps({"checkpoint": str(checkpoint.resolve())}))
    later = RecipeChanges(recipe, accept=False, branch_of=checkpoint)
    assert later.check(branch) is False and later.branch_of is None
    other = recipe_in(tmp_path, "branch", optimizer={"learning_rate": 2e-4})
    with pytest.raises(RecipeError, match="changes from step 6 on"):
        RecipeChanges(other, branch_of=checkpoint).check(branch)
    with pytest.raises(RecipeError, match="did not begin from"):
        RecipeChanges(recipe, branch_of=folder / "checkpoint-3").check(branch)


def test_the_newest_intact_checkpoint_is_that_of_a_change_and_none_is_renamed(folder, tmp_path):
    second = recipe_in(tmp_path, optimizer={"learning_rate": 5e-4})
    damage(folder / "checkpoint-7" / "optimizer.pt", "bit flip")
    assert RecipeChanges(second).of_run(folder).step == 5
    assert (folder / "checkpoint-7").exists()
    assert RecipeChanges(second, resume=folder / "checkpoint-3").of_run(folder).step == 3
    with pytest.raises(CheckpointError, match=r"--resume .*checkpoint-7: damaged"):
        RecipeChanges(second, resume=folder / "checkpoint-7").of_run(folder)


def test_the_plot_marks_the_last_column_at_the_end_of_the_run(folder, tmp_path):
    (folder / "checkpoint-7" / "manifest.json").unlink()
    seal(folder / "checkpoint-7", 7, tokens=4000)
    budget = {"tokens": 3840, "global_batch_tokens": 256}
    proposal = propose(recipe_in(tmp_path, budget=budget), folder, folder / "checkpoint-7")
    assert list(proposal.plot())[-1] == f"         {' ' * 59}^ step 7"
    seed = propose(recipe_in(tmp_path, description="other"), folder, folder / "checkpoint-7")
    assert list(seed.plot()) == []


def test_changes_that_are_dropped_are_named_with_their_steps(folder, tmp_path):
    start(recipe_in(tmp_path, optimizer={"learning_rate": 5e-4}), folder, 5)
    start(recipe_in(tmp_path, optimizer={"learning_rate": 4e-4}), folder, 7)
    third = recipe_in(tmp_path, optimizer={"learning_rate": 3e-4})
    proposal = propose(third, folder, folder / "checkpoint-3", goes_back=True)
    assert str(proposal).endswith("The changes that were made after step 5, 7 are dropped.")
    at_5 = propose(third, folder, folder / "checkpoint-5", goes_back=True)
    assert str(at_5).endswith("The changes that were made after step 7 are dropped.")
    assert "are dropped" not in str(propose(third, folder, folder / "checkpoint-7"))
