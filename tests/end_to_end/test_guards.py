"""Bad steps and too little memory in real runs of several processes: plain, DDP, ZeRO-2 and ZeRO-3 decide the same."""

import json

import pytest
from launching import launch, losses, zero_profile
from safetensors.torch import load_file
from tiny import write_recipe

from cpt.runs.events import read_events

FAULTY = "tests.end_to_end.faulty_stage"
# ZeRO's stage (0: DDP) or FSDP2, and whether states are in host memory
KINDS = [(0, False), (2, False), (2, True), (3, False), (3, True), ("fsdp", False)]
SKIPPED = ("nan_skipped", "spike_skipped", "rolled_back")


class Faulty:
    """The tiny run with faults, on two processes."""

    def __init__(self, sections, folder, *, name="tiny", stage=0, offload=False, micro_batch=2, steps=16, every=4):
        training = {**sections["training"], "per_device_train_batch_size": micro_batch, "bf16": offload}
        if stage == "fsdp":
            training["fsdp"] = True
        elif stage:
            training["deepspeed"] = zero_profile(folder, stage, offload=offload)
        budget = {"tokens": steps * 512, "global_batch_tokens": 512}
        changes = {
            "name": name,
            "stage": FAULTY,
            "budget": budget,
            "training": training,
            "checkpoints": {"every_steps": every, "keep": None},
        }
        self.recipe = write_recipe({**sections, **changes}, folder / f"{name}.yaml")
        self.run = folder / "runs" / name

    def train(self, monkeypatch, *faults, processes=2):
        """Run it, and give the exit code."""
        monkeypatch.setenv("CPT_TEST_FAULTS", json.dumps(faults))
        self.ended = launch(self.recipe, way="torchrun" if processes > 1 else "python", processes=processes)
        return self.ended.returncode

    def told(self, *kinds):
        return [(event["kind"], event["step"]) for event in read_events(self.run) if event["kind"] in kinds]

    def status(self):
        return json.loads((self.run / "status.json").read_text())

    def final(self):
        return load_file(self.run / "final" / "model.safetensors")


def skips_and_rolls_back(sections, folder, monkeypatch, **kind):
    """A NaN and a spike on the second process alone, then five bad rows: all processes skip, then go back."""
    run, reference = Faulty(sections, folder, **kind), Faulty(sections, folder, name="reference", **kind)
    assert reference.train(monkeypatch) == 0, reference.ended.stderr
    bad = {"kind": "nan", "rows": [66 + 8 * step for step in range(5)]}  # of steps 9 to 13, on the second process
    code = run.train(
        monkeypatch,
        {"kind": "nan", "rank": 1, "steps": [6]},
        {"kind": "spike", "rank": 1, "steps": [7], "once": True},
        bad,
    )
    assert code == 0, run.ended.stdout + run.ended.stderr
    first = [("nan_skipped", 6), ("spike_skipped", 7)]
    # With the first two, the third of the bad rows is one too many.
    assert run.told(*SKIPPED)[:6] == [*first, *(("nan_skipped", step) for step in (9, 10, 11)), ("rolled_back", 11)]
    assert len(losses(run.run)) == 16 and run.status()["step"] == 16
    assert losses(run.run)[-1] == pytest.approx(losses(reference.run)[-1], rel=0.05)
    assert all(tensor.isfinite().all() for tensor in run.final().values())


@pytest.mark.slow
def test_ranks_of_ddp_skip_and_go_back_together(tiny_recipe, tmp_path, monkeypatch):
    skips_and_rolls_back(tiny_recipe, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "offload"), KINDS[1:])
def test_sharded_runs_skip_and_go_back_together(tiny_recipe, tmp_path, monkeypatch, stage, offload):
    skips_and_rolls_back(tiny_recipe, tmp_path, monkeypatch, stage=stage, offload=offload)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "offload"), KINDS)
def test_one_spike_costs_less_than_one_percent(tiny_recipe, tmp_path, monkeypatch, stage, offload):
    kind = {"stage": stage, "offload": offload, "steps": 100, "every": 100}
    run, reference = Faulty(tiny_recipe, tmp_path, **kind), Faulty(tiny_recipe, tmp_path, name="reference", **kind)
    assert reference.train(monkeypatch) == run.train(monkeypatch, {"kind": "spike", "steps": [7]}) == 0, (
        run.ended.stderr
    )
    assert run.told(*SKIPPED) == [("spike_skipped", 7)] and not reference.told(*SKIPPED)
    assert losses(run.run)[-1] == pytest.approx(losses(reference.run)[-1], rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "offload"), KINDS)
def test_a_gradient_alone_is_judged_too_and_a_run_that_is_lost_ends_with_code_2(
    tiny_recipe, tmp_path, monkeypatch, stage, offload
):
    run = Faulty(tiny_recipe, tmp_path, stage=stage, offload=offload)
    assert run.train(monkeypatch, {"kind": "gradient", "steps": list(range(8, 17))}) != 0
    assert (
        run.status()["exit_code"] == 2
        and run.status()["error"] == "TrainingError"
        and "diverged" in run.status()["message"]
    )
    assert len(run.told("spike_skipped")) == 20 and len(run.told("rolled_back")) == 3


@pytest.mark.long
@pytest.mark.parametrize(("stage", "offload"), KINDS)
def test_interrupted_in_the_middle_of_bad_steps_the_run_decides_the_same(
    tiny_recipe, tmp_path, monkeypatch, stage, offload
):
    bad = {"kind": "nan", "rows": [66 + 8 * step for step in range(5)]}
    kind = {"stage": stage, "offload": offload, "every": 1}
    straight, broken = Faulty(tiny_recipe, tmp_path, **kind), Faulty(tiny_recipe, tmp_path, name="broken", **kind)
    assert straight.train(monkeypatch, bad) == 0, straight.ended.stderr
    assert broken.train(monkeypatch, bad, {"kind": "error", "steps": [12]}) != 0
    assert broken.told(*SKIPPED) == straight.told(*SKIPPED)[:3]
    assert broken.train(monkeypatch, bad) == 0, broken.ended.stderr
    assert losses(broken.run) == losses(straight.run) and broken.told(*SKIPPED) == straight.told(*SKIPPED)
    expected = straight.final()
    assert all(tensor.equal(expected[name]) for name, tensor in broken.final().items())


def memory_is_found(sections, folder, monkeypatch, fault, *, restarts, micro_batch=4, **kind):
    """Too little memory at step 7 on the second process: the same losses as with enough."""
    kind |= {"micro_batch": micro_batch}
    run, reference = Faulty(sections, folder, **kind), Faulty(sections, folder, name="reference", **kind)
    assert reference.train(monkeypatch) == 0, reference.ended.stderr
    code = run.train(monkeypatch, fault)
    for _ in range(restarts):
        assert code != 0 and (run.status()["error"], run.status()["exit_code"]) == ("RestartNeeded", 75), (
            run.ended.stderr
        )
        code = run.train(monkeypatch, fault)
    assert code == 0, run.ended.stdout + run.ended.stderr
    told = [event for event in read_events(run.run) if event["kind"] == "out_of_memory"]
    assert {event["step"] for event in told} == {7} and all(event["restart"] == bool(restarts) for event in told)
    assert losses(run.run) == pytest.approx(losses(reference.run), rel=1e-5)
    assert json.loads((run.run / "learned.json").read_text()) == {"micro_batch": {"2": fault["above"]}}


@pytest.mark.long
def test_ranks_of_ddp_redo_a_step_together_when_one_is_out_of_memory(tiny_recipe, tmp_path, monkeypatch):
    memory_is_found(
        tiny_recipe, tmp_path, monkeypatch, {"kind": "memory", "rank": 1, "above": 2, "steps": [7]}, restarts=0
    )


@pytest.mark.long
@pytest.mark.parametrize("fault", ["memory", "memory_backward"])
def test_ddp_with_accumulation_redoes_the_step_wherever_memory_ends_before_the_last_backward(
    tiny_recipe, tmp_path, monkeypatch, fault
):
    spec = {"kind": fault, "rank": 1, "above": 1, "steps": [7]}
    memory_is_found(tiny_recipe, tmp_path, monkeypatch, spec, restarts=0, micro_batch=2)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_where_ranks_have_met_already_the_next_start_knows_what_fits(tiny_recipe, tmp_path, monkeypatch, stage):
    spec = {"kind": "memory_backward", "rank": 1, "above": 2, "steps": [7]}
    memory_is_found(tiny_recipe, tmp_path, monkeypatch, spec, restarts=1, micro_batch=4, stage=stage)


@pytest.mark.long
def test_a_single_process_under_deepspeed_is_started_again(tiny_recipe, tmp_path, monkeypatch):
    run = Faulty(tiny_recipe, tmp_path, stage=2)
    fault = {"kind": "memory", "above": 1, "steps": [7]}
    assert run.train(monkeypatch, fault, processes=1) == 75 and "started again" in run.ended.stderr
    assert run.train(monkeypatch, fault, processes=1) == 0 and len(losses(run.run)) == 16


@pytest.mark.long
@pytest.mark.parametrize(("stage", "processes"), [(0, 1), (0, 2), (3, 2)])
def test_where_one_row_is_too_much_the_run_ends_with_code_2(tiny_recipe, tmp_path, monkeypatch, stage, processes):
    run = Faulty(tiny_recipe, tmp_path, stage=stage, micro_batch=1)
    assert run.train(monkeypatch, {"kind": "memory", "steps": [7]}, processes=processes) != 0
    assert (run.status()["error"], run.status()["exit_code"]) == ("ResourceError", 2)
