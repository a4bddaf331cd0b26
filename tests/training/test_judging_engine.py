"""Under DeepSpeed, in a real run of one process: its counters go on over a skipped step, and its weights do not."""

import json

import pytest
import torch
from launching import launch, losses, zero_profile
from safetensors.torch import load_file
from tiny import write_recipe


def run_with_faults(sections, folder, monkeypatch, faults, *, stage):
    """8 steps, a checkpoint after each."""
    training = {**sections["training"], "deepspeed": zero_profile(folder, stage)}
    changes = {
        "stage": "tests.end_to_end.faulty_stage",
        "training": training,
        "checkpoints": {"every_steps": 1, "keep": None},
    }
    monkeypatch.setenv("CPT_TEST_FAULTS", json.dumps(faults))
    ended = launch(write_recipe({**sections, **changes}, folder / "r.yaml"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "runs" / "tiny"


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.long)])
def test_a_skipped_step_counts_and_changes_nothing(tiny_recipe, tmp_path, monkeypatch, stage):
    faults = [{"kind": "nan", "steps": [4]}, {"kind": "gradient", "steps": [7]}]
    run = run_with_faults(tiny_recipe, tmp_path, monkeypatch, faults, stage=stage)
    weights = [load_file(run / f"checkpoint-{step}" / "model.safetensors") for step in range(1, 9)]
    same = [
        all(torch.equal(before[name], after[name]) for name in before)
        for before, after in zip(weights, weights[1:], strict=False)
    ]
    assert same == [False, False, True, False, False, True, False], "after steps 4 and 7 as before them"
    for step in range(1, 9):
        (states,) = (run / f"checkpoint-{step}" / f"global_step{step}").glob(
            "*zero_pp_rank_0*model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        )
        kept = torch.load(states, weights_only=False)
        assert (kept["global_steps"], kept["skipped_steps"]) == (step, (step >= 4) + (step >= 7))
        scheduler = torch.load(run / f"checkpoint-{step}" / "scheduler.pt")
        assert scheduler["last_epoch"] == step, "the schedule goes on"
    assert len(losses(run)) == 8
