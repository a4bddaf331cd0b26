import pytest
import trl
from tiny_rewards import bandit, quiet_trainer, rewards_of

from cpt.stages import rloo


@pytest.mark.slow
def test_it_learns_a_bandit(tmp_path):
    trainer = quiet_trainer(bandit("rloo", tmp_path, steps=60, training={"beta": 0.01}))
    trainer.train()
    found = rewards_of(trainer)
    assert found[0] <= 0.5 and sum(found[-5:]) / 5 > 0.9


def test_a_few_steps_beside_a_reference(tmp_path):
    trainer = quiet_trainer(bandit("rloo", tmp_path, steps=3))
    trainer.train()
    assert trainer.ref_model is not None and trainer.args.beta == 0.05
    assert all("kl" in entry for entry in trainer.state.log_history[:3])


def test_it_is_trls_trainer_on_prompts():
    assert rloo.CONFIG is trl.RLOOConfig and rloo.COLUMNS == ("prompt",)
    assert rloo.rows_of_step({}, 32) == 16
