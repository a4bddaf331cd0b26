from tiny_rewards import bandit, quiet_trainer


def test_a_few_steps_beside_a_reference(tmp_path):
    trainer = quiet_trainer(bandit("rloo", tmp_path, steps=3))
    trainer.train()
    assert trainer.ref_model is not None and trainer.args.beta == 0.05
    assert all("kl" in entry for entry in trainer.state.log_history[:3])
