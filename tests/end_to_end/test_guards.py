"""Bad steps and out-of-memory in real runs of several processes: DDP, FSDP2, ZeRO-2 and ZeRO-3 decide the same, and
`cpt train` restarts them."""

import json
import os
import subprocess

import pytest
from launching import BIN, ROOT, environment_of_a_run, losses, zero_profile
from safetensors.torch import load_file
from tiny import write_recipe

from cpt.runs.events import read_events

FAULTY = "tests.end_to_end.faulty_stage"
# ZeRO's stage (0: DDP) or FSDP2, and whether states are in host memory
KINDS = [(0, False), (2, False), (2, True), (3, False), (3, True), ("fsdp", False)]
SKIPPED = ("nan_skipped", "spike_skipped", "rolled_back")


class Faulty:
    """The tiny run with faults, on two processes."""

    def __init__(self, sections, folder, *, name="tiny", stage=0, offload=False, micro_batch=2, every=4):
        training = {**sections["training"], "per_device_train_batch_size": micro_batch, "bf16": offload}
        if stage == "fsdp":
            training["fsdp"] = True
        elif stage:
            training["deepspeed"] = zero_profile(folder, stage, offload=offload)
        changes = {
            "name": name,
            "stage": FAULTY,
            "budget": {"tokens": 16 * 512, "global_batch_tokens": 512},
            "training": training,
            "checkpoints": {"every_steps": every, "keep": None},
        }
        self.recipe = write_recipe({**sections, **changes}, folder / f"{name}.yaml")
        self.run = folder / "runs" / name

    def train(self, *faults, processes=2, launcher=()):
        """Run it, and return the exit code."""
        environment = {
            **environment_of_a_run(),
            "CPT_TEST_FAULTS": json.dumps(faults),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        words = launcher or (str(BIN / "cpt"), "train", *(("--processes", "2") if processes > 1 else ()))
        self.ended = subprocess.run(
            [*words, str(self.recipe)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540
        )
        return self.ended.returncode

    def events(self, *kinds):
        return [(event["kind"], event["step"]) for event in read_events(self.run) if event["kind"] in kinds]

    def status(self):
        return json.loads((self.run / "status.json").read_text())

    def final(self):
        return load_file(self.run / "final" / "model.safetensors")


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        pytest.param(*kind, marks=pytest.mark.slow if kind in ((0, False), (2, False)) else pytest.mark.long)
        for kind in KINDS
    ],
)
def test_all_processes_skip_and_roll_back_together(tiny_recipe, tmp_path, stage, offload):
    """A NaN and a spike on the second process alone, then five bad rows."""
    run, reference = (
        Faulty(tiny_recipe, tmp_path, name=name, stage=stage, offload=offload) for name in ("tiny", "reference")
    )
    assert reference.train() == 0, reference.ended.stderr
    bad = {"kind": "nan", "rows": [66 + 8 * step for step in range(5)]}  # of steps 9 to 13, on the second process
    code = run.train({"kind": "nan", "rank": 1, "steps": [6]}, {"kind": "spike", "rank": 1, "steps": [7]}, bad)
    assert code == 0, run.ended.stdout + run.ended.stderr
    first = [("nan_skipped", 6), ("spike_skipped", 7)]
    # With the first two, the third of the bad rows is one too many.
    assert run.events(*SKIPPED)[:6] == [*first, *(("nan_skipped", step) for step in (9, 10, 11)), ("rolled_back", 11)]
    assert len(losses(run.run)) == 16 and run.status()["step"] == 16
    assert losses(run.run)[-1] == pytest.approx(losses(reference.run)[-1], rel=0.05)
    assert all(tensor.isfinite().all() for tensor in run.final().values())


@pytest.mark.long
@pytest.mark.parametrize(("stage", "offload"), KINDS)
def test_gradients_are_judged_too_and_a_run_that_keeps_diverging_ends_with_code_2(
    tiny_recipe, tmp_path, stage, offload
):
    run = Faulty(tiny_recipe, tmp_path, stage=stage, offload=offload)
    assert run.train({"kind": "gradient", "steps": list(range(8, 17))}) == 2
    assert (run.status()["exit_code"], run.status()["error"]) == (2, "TrainingError")
    assert len(run.events("spike_skipped")) == 20 and len(run.events("rolled_back")) == 3


@pytest.mark.long
@pytest.mark.parametrize(("stage", "offload"), KINDS)
def test_interrupted_in_the_middle_of_bad_steps_the_run_decides_the_same(tiny_recipe, tmp_path, stage, offload):
    bad = {"kind": "nan", "rows": [66 + 8 * step for step in range(5)]}
    straight, broken = (
        Faulty(tiny_recipe, tmp_path, name=name, stage=stage, offload=offload, every=1) for name in ("tiny", "broken")
    )
    assert straight.train(bad) == 0, straight.ended.stderr
    assert broken.train(bad, {"kind": "error", "steps": [12]}) != 0
    assert broken.events(*SKIPPED) == straight.events(*SKIPPED)[:3]
    assert broken.train(bad) == 0, broken.ended.stderr
    assert losses(broken.run) == losses(straight.run) and broken.events(*SKIPPED) == straight.events(*SKIPPED)
    expected = straight.final()
    assert all(tensor.equal(expected[name]) for name, tensor in broken.final().items())


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        pytest.param(0, "memory", marks=pytest.mark.slow),
        pytest.param(0, "memory_backward", marks=pytest.mark.long),
        pytest.param(2, "memory_backward", marks=pytest.mark.long),
        pytest.param(3, "memory_backward", marks=pytest.mark.long),
        pytest.param("fsdp", "memory_backward", marks=pytest.mark.long),
    ],
)
def test_out_of_memory_on_one_process_restarts_all_with_smaller_micro_batches(tiny_recipe, tmp_path, stage, fault):
    """The same losses as with enough memory."""
    run, reference = (
        Faulty(tiny_recipe, tmp_path, name=name, stage=stage, micro_batch=4) for name in ("tiny", "reference")
    )
    assert reference.train() == 0, reference.ended.stderr
    assert run.train({"kind": fault, "rank": 1, "above": 2, "steps": [7]}) == 0, run.ended.stdout + run.ended.stderr
    assert run.events("out_of_memory") == [("out_of_memory", 7)]
    assert losses(run.run) == pytest.approx(losses(reference.run), rel=1e-5)
    assert json.loads((run.run / "learned.json").read_text()) == {"micro_batch": {"2": 2}}


@pytest.mark.long
def test_without_a_launcher_that_restarts_the_run_names_the_command(tiny_recipe, tmp_path):
    run = Faulty(tiny_recipe, tmp_path, micro_batch=4)
    torchrun = (str(BIN / "torchrun"), "--standalone", "--nproc_per_node=2", "cpt/train.py")
    fault = {"kind": "memory", "above": 2, "steps": [7]}
    assert run.train(fault, launcher=torchrun) != 0
    assert (run.status()["error"], run.status()["exit_code"]) == ("RestartNeeded", 76)
    assert "ame command" in run.ended.stderr
    assert run.train(fault, launcher=torchrun) == 0 and len(losses(run.run)) == 16


@pytest.mark.long
@pytest.mark.parametrize(("stage", "processes"), [(0, 1), (0, 2), (3, 2)])
def test_where_one_row_is_too_much_the_run_ends_with_code_2(tiny_recipe, tmp_path, stage, processes):
    run = Faulty(tiny_recipe, tmp_path, stage=stage, micro_batch=1)
    assert run.train({"kind": "memory", "steps": [7]}, processes=processes) == 2
    assert (run.status()["error"], run.status()["exit_code"]) == ("ResourceError", 2)
