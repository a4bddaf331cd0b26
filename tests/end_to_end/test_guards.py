"""Bad steps and out-of-memory on one of two processes: both decide the same, and `cpt train` restarts them. Each kind
of run: tests/faults."""

import json
import subprocess

import pytest
from launching import BIN, ROOT, environment_of_a_run, losses, zero_profile
from safetensors.torch import load_file
from tiny import write_recipe

from cpt.runs.events import read_events

pytestmark = pytest.mark.slow


class Faulty:
    """The tiny run with faults, on two processes; stage 0 is DDP."""

    def __init__(self, sections, folder, *, name="tiny", stage=0, micro_batch=2):
        training = {**sections["training"], "per_device_train_batch_size": micro_batch}
        if stage:
            training["deepspeed"] = zero_profile(folder, stage)
        changes = {
            "name": name,
            "stage": "tests.end_to_end.faulty_stage",
            "budget": {"tokens": 16 * 512, "global_batch_tokens": 512},
            "training": training,
            "checkpoints": {"every_steps": 4, "keep": None},
        }
        self.recipe = write_recipe({**sections, **changes}, folder / f"{name}.yaml")
        self.run = folder / "runs" / name

    def train(self, *faults):
        """Run it, and return the exit code."""
        environment = {**environment_of_a_run(), "CPT_TEST_FAULTS": json.dumps(faults), "PYTHONPATH": str(ROOT)}
        words = [BIN / "cpt", "train", self.recipe, "--processes", "2"]
        return subprocess.run(words, cwd=ROOT, env=environment, timeout=540).returncode

    def events(self, *kinds):
        return [(event["kind"], event["step"]) for event in read_events(self.run) if event["kind"] in kinds]

    def status(self):
        return json.loads((self.run / "status.json").read_text())


def test_all_processes_skip_and_roll_back_together(tiny_recipe, tmp_path):
    """A NaN and a spike on the second process alone, then five bad rows."""
    run = Faulty(tiny_recipe, tmp_path, stage=2)
    bad = {"kind": "nan", "rows": [66 + 8 * step for step in range(5)]}  # of steps 9 to 13, on the second process
    assert run.train({"kind": "nan", "rank": 1, "steps": [6]}, {"kind": "spike", "rank": 1, "steps": [7]}, bad) == 0
    expected = [("nan_skipped", 6), ("spike_skipped", 7), *(("nan_skipped", step) for step in (9, 10, 11))]
    # With the first two, the third of the bad rows is one too many.
    assert run.events("nan_skipped", "spike_skipped", "rolled_back")[:6] == [*expected, ("rolled_back", 11)]
    assert len(losses(run.run)) == 16 and run.status()["step"] == 16
    weights = load_file(run.run / "final" / "model.safetensors")
    assert losses(run.run)[-1] < losses(run.run)[0] and all(tensor.isfinite().all() for tensor in weights.values())


def test_the_main_process_asks_the_recovery_handler_for_all(tiny_recipe, tmp_path):
    tiny_recipe["safety"] = {"on_spike": "tests.end_to_end.faulty_stage:only_main_decides"}
    run = Faulty(tiny_recipe, tmp_path)
    assert run.train({"kind": "nan", "rank": 1, "steps": [5, 6, 7, 8, 9, 10]}) == 0
    assert run.events("nan_skipped", "rolled_back") == [("nan_skipped", step) for step in range(5, 11)]
    assert len(losses(run.run)) == 16


def test_out_of_memory_on_one_process_restarts_all_with_smaller_micro_batches(tiny_recipe, tmp_path):
    """The same losses as with enough memory."""
    run, reference = (Faulty(tiny_recipe, tmp_path, name=name, micro_batch=4) for name in ("tiny", "reference"))
    assert reference.train() == 0
    assert run.train({"kind": "memory", "rank": 1, "above": 2, "steps": [7]}) == 0
    assert run.events("out_of_memory") == [("out_of_memory", 7)]
    assert losses(run.run) == pytest.approx(losses(reference.run), rel=1e-5)
    assert json.loads((run.run / "learned.json").read_text()) == {"micro_batch": {"2": 2}}
