import shutil

import pytest

from cpt.recipe.schema import Checkpoints
from cpt.rehearsal.disk import GIB, Sizes, full_steps, judge_disk, kept, weights_steps
from cpt.stages.length import RunLength

LENGTH = RunLength(steps=1000, rows_per_step=4, gradient_accumulation_steps=2, tokens_per_step=256, micro_batch=2)
SMALL = Sizes(checkpoint=1000, weights=100, export=100)


def section(**keys):
    return Checkpoints.model_validate(keys)


def at_once(**keys):
    checkpoints = section(**keys)
    return kept(checkpoints, LENGTH, full_steps(checkpoints, LENGTH), is_archived=checkpoints.archive is not None)


@pytest.mark.parametrize(
    ("keys", "saves", "most"),
    [
        ({}, 1, 1),
        ({"every_steps": 100, "keep": 3}, 10, 4),
        ({"every_steps": 300, "keep": 3}, 4, 4),
        ({"every_tokens": 25_600, "keep": 3}, 10, 4),
        ({"every_steps": 100, "keep": None}, 10, 10),
        ({"every_steps": 100, "keep": {"last": 2, "every": 500}}, 10, 4),
        ({"every_steps": 100, "keep": {"last": 2, "best": "eval_loss"}}, 10, 4),
        ({"every_steps": 100, "keep": 1, "archive": "s3://bucket"}, 10, 4),
    ],
)
def test_as_many_checkpoints_are_counted_as_the_rule_lets_stay_while_one_is_written(keys, saves, most):
    found = at_once(**keys)
    assert (found.saves, found.at_once) == (saves, most)


def test_the_weights_alone_are_published_where_no_checkpoint_is():
    checkpoints = section(every_steps=100, weights_every_steps=50)
    assert weights_steps(checkpoints, LENGTH) == list(range(50, 1000, 100))


def test_what_fits_is_counted_and_what_is_there_already_needs_no_room(tmp_path):
    found = judge_disk(section(every_steps=100), LENGTH, SMALL, tmp_path, 0)
    assert found.verdict == "ok" and found.figure.startswith("4 of 10 checkpoints x 0.0 MiB")
    free = shutil.disk_usage(tmp_path).free
    large = Sizes(checkpoint=(free + GIB) // 4, weights=0, export=0)
    assert judge_disk(section(every_steps=100), LENGTH, large, tmp_path, 0).verdict == "FAILED"
    with (tmp_path / "unwritten").open("wb") as file:  # takes no room
        file.truncate(3 * GIB)
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "unwritten").rename(tmp_path / "checkpoint-7" / "model.safetensors")
    assert judge_disk(section(every_steps=100), LENGTH, large, tmp_path, 0).verdict == "ok"


def test_a_disk_that_is_too_small_is_a_failure_with_the_key_to_change(tmp_path):
    found = judge_disk(section(every_steps=1, keep=None), LENGTH, Sizes(10**15, 0, 0), tmp_path, 0)
    assert (found.verdict, found.error) == ("FAILED", "ResourceError")
    assert "1000 of 1000 checkpoints" in found.figure and "`checkpoints.keep`" in found.figure
    assert "another disk" in judge_disk(section(), LENGTH, Sizes(10**15, 0, 0), tmp_path, 0).figure


def test_an_archive_on_the_same_disk_takes_its_room_too(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    sizes = Sizes(checkpoint=free // 8, weights=0, export=0)
    assert judge_disk(section(every_steps=100), LENGTH, sizes, tmp_path, 0).verdict == "ok"
    found = judge_disk(section(every_steps=100, archive=str(tmp_path / "archive")), LENGTH, sizes, tmp_path, 0)
    assert found.verdict == "FAILED" and "archive" in found.figure


def test_an_archive_on_another_disk_is_judged_by_its_own_room(tmp_path):
    other = "/dev/shm"
    if shutil.disk_usage(other).total == shutil.disk_usage(tmp_path).total:
        pytest.skip("needs two disks")
    sizes = Sizes(checkpoint=max(1, shutil.disk_usage(other).free // 8), weights=0, export=0)
    if 4 * sizes.checkpoint > shutil.disk_usage(tmp_path).free:
        pytest.skip("needs a second disk that is smaller")
    found = judge_disk(section(every_steps=100, archive=other), LENGTH, sizes, tmp_path, 0)
    assert found.verdict == "FAILED" and "Nothing is ever removed there" in found.figure


def test_where_a_rule_of_the_users_own_cannot_be_asked_ahead_all_checkpoints_are_counted(tmp_path, monkeypatch):
    (tmp_path / "my_rules.py").write_text(
        "def best(checkpoints):\n    return [one for one in checkpoints if one.metrics['bleu'] > 0]\n"
    )
    monkeypatch.chdir(tmp_path)
    rule = section(every_steps=100, keep={"name": "my_rules:best"})
    found = judge_disk(rule, LENGTH, SMALL, tmp_path, 0)
    assert (
        found.figure.startswith("10 of 10 checkpoints") and "cannot be asked ahead (KeyError: 'bleu')" in found.figure
    )
    assert judge_disk(rule, LENGTH, Sizes(10**15, 0, 0), tmp_path, 0).verdict == "FAILED"
