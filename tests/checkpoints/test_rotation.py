import json

import pytest
from publishing import save

from cpt.checkpoints.retention import RULES, metrics_of, rotate
from cpt.errors import RecipeError
from cpt.recipe.schema import Keep


def publish(folder, *steps):
    for step in steps:
        save(folder, step, 3)


def left(folder):
    return sorted((path.name for path in folder.iterdir()), key=lambda name: int(name.rpartition("-")[2]))


def keep(**options):
    return Keep.model_validate(options)


def test_the_last_ones_stay_by_step_and_not_by_time(tmp_path):
    publish(tmp_path, 100, 20, 3)
    assert [path.name for path in rotate(tmp_path, keep(last=2))] == ["checkpoint-3"]
    assert left(tmp_path) == ["checkpoint-20", "checkpoint-100"]


def test_a_figure_is_that_of_the_checkpoints_own_step(tmp_path):
    save(tmp_path, 5, 3)
    state = tmp_path / "checkpoint-5" / "trainer_state.json"
    history = [{"step": 4, "eval_loss": 9.0}, {"step": 5, "loss": 3.0}, {"step": 5, "eval_loss": 2.0}]
    state.write_text(json.dumps({"log_history": history}))
    assert metrics_of(tmp_path / "checkpoint-5", 5) == {"eval_loss": 2.0}


def test_what_is_not_whole_is_not_counted_and_not_touched(tmp_path):
    publish(tmp_path, 1, 2, 3, 4)
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()
    (tmp_path / "checkpoint-9").mkdir()  # of another program
    (tmp_path / "checkpoint-9" / "model.safetensors").touch()
    rotate(tmp_path, keep(last=2))
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-4", "checkpoint-9"]


def test_what_is_still_read_and_the_newest_always_stay(tmp_path, monkeypatch):
    publish(tmp_path, 1, 2, 3)
    monkeypatch.setitem(RULES, "none", lambda checkpoints: [])
    rotate(tmp_path, keep(name="none"), spared=[tmp_path / "checkpoint-1"])
    assert left(tmp_path) == ["checkpoint-1", "checkpoint-3"]


def test_a_rule_of_ones_own_sees_steps_tokens_folders_and_figures(tmp_path, monkeypatch):
    (tmp_path / "my_keep.py").write_text(
        "def odd(checkpoints, *, least=0):\n    return [c for c in checkpoints if c.step % 2 and c.tokens > least]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = tmp_path / "run"
    publish(run, 1, 2, 3, 4)
    rotate(run, keep(name="my_keep:odd", least=256))
    assert left(run) == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"lasst": 3}, "`checkpoints.keep.lasst` is not an option of newest. Did you mean `last`"),
        ({"name": "newst"}, "`checkpoints.keep.name`: no rule called `newst`. Did you mean `newest`"),
        ({"last": 0}, "must be 1 or more"),
    ],
)
def test_a_rule_that_is_none_is_refused(tmp_path, options, complaint):
    publish(tmp_path, 1)
    with pytest.raises(RecipeError, match=complaint):
        rotate(tmp_path, keep(**options))
