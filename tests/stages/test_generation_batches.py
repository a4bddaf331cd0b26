import pytest
import torch
from tiny_faults import train_to_the_end
from tiny_rewards import bandit, losses_of, quiet_trainer, rewards_of, weights_of
from transformers.trainer_utils import set_seed

from cpt.errors import RecipeError, ResourceError
from cpt.training.loss_guard import SpikeDetector

SPREAD = {"training": {"steps_per_generation": 2, "num_iterations": 2}}
"""A generation lasts for four steps."""


def trained(stage, folder, resume=None, **sections):
    trainer = quiet_trainer(
        bandit(stage, folder, steps=8, checkpoints={"every_steps": 3, "keep": {"last": 9}}, **sections)
    )
    set_seed(1 if resume is None else 2)  # what a start leaves behind differs from the run's own numbers
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "step"),
    [
        ("grpo", 3),
        ("spo", 3),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [("ppo", 3), ("rloo", 3), ("grpo", 6), ("ppo", 6), ("spo", 6)]
        ),
    ],
)
def test_a_run_that_goes_on_in_the_middle_of_a_generation_is_the_run_that_was_never_interrupted(stage, step, tmp_path):
    straight = trained(stage, tmp_path / "straight", **SPREAD)
    checkpoint = tmp_path / "straight" / "run" / f"checkpoint-{step}"
    assert (checkpoint / "generation.pt").exists()
    resumed = trained(stage, tmp_path / "resumed", resume=str(checkpoint), **SPREAD)
    assert losses_of(resumed)[-1] == losses_of(straight)[-1]
    assert losses_of(resumed) == losses_of(straight)[-len(losses_of(resumed)) :]
    assert len(losses_of(resumed)) >= 8 - step
    assert str(resumed.own_state()) == str(straight.own_state())
    after = (8 - step + 3) // 4  # generations that begin behind the checkpoint
    assert rewards_of(resumed)[-after:] == rewards_of(straight)[-after:]
    assert all(torch.equal(a, b) for a, b in zip(weights_of(resumed), weights_of(straight), strict=True))


@pytest.mark.parametrize("stage", ["grpo", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("ppo", "spo"))])
def test_out_of_memory_restarts_with_smaller_micro_batches_and_the_same_generations(stage, tmp_path):
    calls = []

    def trainer_that_fails_once():
        trainer = quiet_trainer(
            bandit(stage, tmp_path, steps=8, training={"per_device_train_batch_size": 16, **SPREAD["training"]})
        )
        loss_of = trainer._compute_loss

        def fails_once(model, inputs):
            calls.append(len(inputs["completion_ids"]))
            if len(calls) == 3:
                raise torch.OutOfMemoryError("out of memory")
            return loss_of(model, inputs)

        trainer._compute_loss = fails_once
        return trainer

    trainer = train_to_the_end(trainer_that_fails_once, restarts=1)
    assert calls == [16] * 3 + [8] * 12 and trainer.state.global_step == 8
    arguments = trainer.args
    assert arguments.generation_batch_size == 32
    assert arguments.per_device_train_batch_size * arguments.steps_per_generation == 32
    assert len({str(batch["completion_ids"].shape) for batch in trainer._buffered_inputs}) == 1


def test_memory_that_ends_while_sampling_is_told_apart(tmp_path):
    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=2))
    trainer.model.generate = raising(torch.OutOfMemoryError("out of memory"))
    with pytest.raises(ResourceError, match=r"sampling 32 completions.*`training.generation_batch_size`"):
        trainer.train()


def raising(problem):
    def fails(*_, **__):
        raise problem

    return fails


@pytest.mark.slow
def test_a_roll_back_makes_completions_anew_without_the_prompts_that_are_left_out(tmp_path, monkeypatch):
    judge, bad = SpikeDetector.check, set(range(7, 12))

    def judges(self, step, figures):
        broken = step in bad
        bad.discard(step)
        return judge(self, step, figures * torch.nan if broken else figures)

    monkeypatch.setattr(SpikeDetector, "check", judges)
    section = {
        "safety": {"loss_guard": {"name": "robust", "skips": 4, "window": 16}},
        "checkpoints": {"every_steps": 2, "keep": {"last": 9}},
    }
    answered = []

    def make():
        trainer = quiet_trainer(bandit("grpo", tmp_path, steps=12, **SPREAD, **section))
        share_of = trainer.share_of
        trainer.share_of = lambda prompts: answered.append([row["number"] for row in prompts]) or share_of(prompts)
        return trainer

    trainer = train_to_the_end(make, restarts=1)
    assert trainer.rows_of_steps.left_out == [(12, 22)]
    first = [list(range(8)), list(range(8, 16)), list(range(16, 24))]
    assert answered == [
        *first,
        [8, 9, 10, 11, 22, 23, 24, 25],
        list(range(26, 34)),
    ]  # back at step 6, in the middle of a generation
    assert trainer.state.global_step == 12
    assert all(weight.isfinite().all() for weight in weights_of(trainer))


def test_steps_without_gradients_make_no_spike_of_one_with_but_what_is_not_finite_is_skipped(tmp_path):
    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=1))
    trainer.train()
    trainer.guard.loss_guard = SpikeDetector(trainer.recipe.safety.loss_guard, torch.device("cpu"))
    for _ in range(20):
        assert not trainer.guard.check_metrics(torch.tensor([0.0, 0.0]))
    assert not trainer.guard.check_metrics(torch.tensor([3.0, 500.0]))
    for broken in ([torch.nan, 1.0], [0.0, torch.inf], [0.0, torch.nan]):
        assert trainer.guard.check_metrics(torch.tensor(broken))
    trainer.args.max_grad_norm = 0.0
    assert trainer.guard.check_metrics(torch.tensor([0.0, 500.0]))


def test_the_reference_is_what_the_run_began_with(tmp_path):
    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=10, training={"beta": 0.1}))
    before = [weight.clone() for weight in weights_of(trainer)]
    trainer.train()
    kept = [parameter for _, parameter in sorted(trainer.ref_model.named_parameters())]
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    assert not any(parameter.requires_grad for parameter in kept)
    divergence = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert divergence[0] == 0 and divergence[-1] > 0


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"training": {"reward_weights": [1.0]}}, "write `weight`"),
        (
            {"training": {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "num_generations": 2}},
            "be a multiple of the other",
        ),
    ],
)
def test_recipes_that_cannot_be_are_refused(sections, says, tmp_path):
    with pytest.raises(RecipeError, match=says):
        quiet_trainer(bandit("grpo", tmp_path, steps=1, **sections))


def test_advantages_of_groups_mean_nothing_to_other_stages(tmp_path):
    with pytest.raises(RecipeError, match="scale_rewards` has no effect"):
        quiet_trainer(bandit("ppo", tmp_path, steps=1, training={"scale_rewards": "batch"}))


def test_an_evaluation_tells_rewards_and_leaves_the_runs_random_numbers_alone(tmp_path):
    from types import SimpleNamespace

    trainer = quiet_trainer(
        bandit("grpo", tmp_path, steps=1, training={"num_generations_eval": 2, "per_device_eval_batch_size": 4})
    )
    trainer.held_out = {
        "questions": SimpleNamespace(rows=[trainer.rows[number] for number in range(6)], form="prompt")
    }
    before = torch.random.get_rng_state()
    first, again = trainer.evaluate(), trainer.evaluate()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert 0 <= first["eval_questions_rewards/exact_match/mean"] <= 1
    assert first == again
