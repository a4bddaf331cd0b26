"""The first save of a run is read back from the disk before anything relies on it, in every kind of run."""

import pytest
from saved_runs import events, published, trainer_of

from cpt.checkpoints.manifest import damages
from cpt.checkpoints.transaction import SaveFailed
from cpt.runs.events import read_events
from cpt.training import saving

real_read_back = saving.read_back


@pytest.fixture
def reads(monkeypatch):
    """The folders that were read back, by name; a disk that is to fail so often changes their weights right before."""
    seen = Reads()

    def read_back(folder, model):
        seen.append(folder.name)
        if len(seen) <= seen.failures:
            path = folder / "model.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        real_read_back(folder, model)

    monkeypatch.setattr(saving, "read_back", read_back)
    return seen


class Reads(list):
    failures = 0


@pytest.mark.parametrize("in_background", [False, True])
def test_the_first_save_of_each_kind_is_read_back_and_no_other(tiny_recipe, tmp_path, reads, in_background):
    trainer = trainer_of(tiny_recipe, tmp_path, every_steps=2, weights_every_steps=1, in_background=in_background)
    trainer.train()
    assert reads == ["weights-1", "checkpoint-2"] and published(trainer)[-1] == "weights-3"


@pytest.mark.parametrize("in_background", [False, True])
def test_a_disk_that_changes_the_first_saves_is_told_of_until_one_is_sound(
    tiny_recipe, tmp_path, reads, in_background
):
    reads.failures = 2
    trainer = trainer_of(tiny_recipe, tmp_path, in_background=in_background)
    trainer.train()
    assert reads == ["checkpoint-1", "checkpoint-2", "checkpoint-3"] and published(trainer) == [
        "checkpoint-3",
        "checkpoint-4",
    ]
    assert events(trainer) == [("save_failed", 1), ("save_failed", 2), ("saved_again", 3)]
    assert (
        "the disk does not hold what was written: model.safetensors: hash"
        in read_events(trainer.run_folder)[0]["message"]
    )
    assert damages(trainer.run_folder / "checkpoint-3") == []


@pytest.mark.parametrize("in_background", [False, True])
def test_a_first_save_without_the_models_weights_ends_the_run(tiny_recipe, tmp_path, monkeypatch, in_background):
    monkeypatch.setattr(
        "cpt.checkpoints.transaction.count_stored", lambda _: 7
    )  # placeholders, as ZeRO-3 may save them
    trainer = trainer_of(tiny_recipe, tmp_path, every_steps=2, in_background=in_background)
    with pytest.raises(SaveFailed, match="weights are 7 numbers of .*no model could be loaded"):
        trainer.train()
    assert published(trainer) == [] and events(trainer) == [("save_failed", 2)]
    assert trainer.state.global_step == (4 if in_background else 2), (
        "a save in the background is heard of at the next one"
    )
