"""The loss of each source is that of all processes together, however many they are and whoever keeps their weights."""

import json

import pytest
from launching import launch, zero_profile
from tiny import write_recipe


def first_line(sections, folder, *, way="python", processes=1, **training):
    """What the first step logged."""
    folder.mkdir()
    sections = {**sections, "output_dir": str(folder / "runs"), "budget": {"tokens": 4 * 512, "global_batch_tokens": 512}}
    sections["training"] = {**sections["training"], **training}
    ended = launch(write_recipe(sections, folder / "recipe.yaml"), way=way, processes=processes)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize(
    "stage", [pytest.param(None, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_two_processes_tell_what_one_does(stage, tiny_recipe, tmp_path):
    alone = first_line(tiny_recipe, tmp_path / "one", per_device_train_batch_size=8)
    engine = {} if stage is None else {"deepspeed": zero_profile(tmp_path, stage)}
    both = first_line(tiny_recipe, tmp_path / "two", way="torchrun", processes=2, per_device_train_batch_size=4, **engine)
    for name in ("loss_domain", "loss_general", "loss", "tokens_domain"):
        assert both[name] == pytest.approx(alone[name], rel=1e-4)
    assert alone["loss_domain"] != alone["loss_general"]
