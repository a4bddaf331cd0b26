import pytest
from tiny_faults import trainer_of

from cpt.reproduce.program import EndsAtLog, EnoughSteps


def test_the_run_ends_when_the_log_of_the_step_is_written(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path / "run", training={**tiny_recipe["training"], "logging_steps": 2})
    trainer.add_callback(EndsAtLog(3))
    with pytest.raises(EnoughSteps):
        trainer.train()
    assert trainer.state.global_step == 4
    assert '"step": 4' in (trainer.run_folder / "metrics.jsonl").read_text().splitlines()[-1]
