"""Stages that learn from what they write: generations over steps, their rewards, restarts and evaluations."""

from types import SimpleNamespace

import pytest
import torch
from tiny_rewards import MODEL, bandit, losses_of, quiet_trainer, rewards_of, weights_of, words
from tiny_trainers import train_to_the_end
from transformers.trainer_utils import set_seed

from cpt.errors import RecipeError, ResourceError, TrainingError
from cpt.stages.build import end_answers_at_turns
from cpt.stages.generating import SingleAnswers
from cpt.stages.rewards import REWARDS
from cpt.training.generations import Generations
from cpt.training.loss_guard import SpikeDetector
from cpt.training.restart import remember_micro_batch

pytestmark = pytest.mark.heavy

SPREAD = {"training": {"steps_per_generation": 2, "num_iterations": 2}}
"""A generation lasts for four steps."""


def trained(stage, folder, resume=None):
    """GRPO also adapts the weight of its entropy, which is a state of the stage."""
    own = {"use_adaptive_entropy": True, "entropy_coef": 0.01} if stage == "grpo" else {}
    training = {**SPREAD["training"], **own}
    trainer = quiet_trainer(
        bandit(stage, folder, steps=6, checkpoints={"every_steps": 3}, training=training)
    )
    set_seed(
        1 if resume is None else 2
    )  # what a start leaves behind differs from the run's own numbers
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    "stage",
    ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rloo", "spo", "ppo"))],
)
def test_a_run_resumed_in_the_middle_of_a_generation_is_the_run_that_was_never_interrupted(
    stage, tmp_path
):
    straight = trained(stage, tmp_path / "straight")
    checkpoint = tmp_path / "straight" / "run" / "checkpoint-3"
    assert (checkpoint / "generation.pt").exists()
    resumed = trained(stage, tmp_path / "resumed", resume=str(checkpoint))
    assert losses_of(resumed)[-3:] == losses_of(straight)[-3:]
    assert str(resumed.own_state()) == str(straight.own_state())
    assert rewards_of(resumed)[-1] == rewards_of(straight)[-1], (
        "of the generation after the checkpoint"
    )
    assert all(
        torch.equal(a, b) for a, b in zip(weights_of(resumed), weights_of(straight), strict=True)
    )


@pytest.mark.slow
def test_out_of_memory_restarts_with_smaller_micro_batches_and_the_same_generations(tmp_path):
    calls, training = [], {"per_device_train_batch_size": 16, **SPREAD["training"]}

    def trainer_that_fails_once():
        trainer = quiet_trainer(bandit("grpo", tmp_path, steps=4, training=training))
        loss_of = trainer._compute_loss

        def fails_once(model, inputs):
            calls.append(len(inputs["completion_ids"]))
            if len(calls) == 3:
                raise torch.OutOfMemoryError("out of memory")
            return loss_of(model, inputs)

        trainer._compute_loss = fails_once
        return trainer

    trainer = train_to_the_end(trainer_that_fails_once, restarts=1)
    assert calls == [16] * 3 + [8] * 4 and trainer.state.global_step == 4
    assert trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation == 32
    assert trainer.args.generation_batch_size == 32
    assert len({str(batch["completion_ids"].shape) for batch in trainer._buffered_inputs}) == 1


@pytest.mark.parametrize(
    ("steps_per_generation", "learned", "micro_batches", "prompts"),
    [(3, 4, 12, 6), (3, None, 3, 6), (None, 4, 4, 2)],
)
def test_after_a_lack_of_memory_a_generation_is_as_large_as_the_recipe_says(
    tmp_path, steps_per_generation, learned, micro_batches, prompts
):
    training = {"per_device_train_batch_size": 16, "num_iterations": 2}
    if steps_per_generation is not None:
        training |= {"steps_per_generation": 3, "gradient_accumulation_steps": 3}
    recipe = bandit("grpo", tmp_path, steps=4, training=training)
    if learned is not None:
        (tmp_path / recipe.name).mkdir()
        remember_micro_batch(tmp_path / recipe.name, 1, learned)
    trainer = quiet_trainer(recipe)
    assert trainer.args.per_device_train_batch_size == (learned or 16)
    assert trainer.args.gradient_accumulation_steps == micro_batches
    assert trainer.generations == Generations(prompts, 2 * micro_batches, micro_batches)
    assert trainer.args.generation_batch_size == 8 * prompts


def test_a_run_resumed_between_two_generations_samples_anew(tmp_path):
    """Also where the micro-batch has grown, so that stored completions do not fit."""
    sections = {"steps": 3, "checkpoints": {"every_steps": 1, "keep": None}}
    straight = quiet_trainer(bandit("grpo", tmp_path / "straight", **sections))
    straight.train()
    checkpoint = tmp_path / "straight" / "run" / "checkpoint-2"
    assert not (checkpoint / "generation.pt").exists()
    resumed = quiet_trainer(bandit("grpo", tmp_path / "resumed", **sections))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses_of(resumed)[-1] == losses_of(straight)[-1]
    torch.save(
        {"buffered": [{"completion_ids": torch.ones(2, 2)}] * 3}, checkpoint / "generation.pt"
    )
    grown = quiet_trainer(bandit("grpo", tmp_path / "grown", **sections))
    grown.train(resume_from_checkpoint=str(checkpoint))
    assert losses_of(grown)[-1] == losses_of(straight)[-1]


def test_a_run_of_which_no_completion_was_scored_ends_with_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(REWARDS, "never", lambda completions: [None] * len(completions))
    recipe = bandit("grpo", tmp_path, steps=1, rewards=["never"])
    with pytest.raises(TrainingError, match="no reward applied"):
        quiet_trainer(recipe).train()


def test_each_process_keeps_its_completions_and_a_roll_back_drops_them(tmp_path, monkeypatch):
    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=1, **SPREAD))
    assert trainer.stage_states() == {}
    trainer.sampled_batches = [{"completion_ids": torch.ones(2, 3)}]
    assert trainer.stage_states() == {}, "between two generations"
    trainer.state.global_step = 1
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    monkeypatch.setattr(type(trainer.args), "process_index", 1)
    assert trainer.stage_states() == {
        "generation_1.pt": {"buffered": trainer.sampled_batches, "last": None}
    }
    trainer.on_rollback()
    trainer.last = {"rewards": torch.ones(3)}
    assert trainer.stage_states() == {"generation_1.pt": {"buffered": None, "last": trainer.last}}


def test_operations_of_a_step_are_those_of_its_completions(tmp_path):
    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=1))
    weights = trainer.model.num_parameters(exclude_embeddings=True)
    prompts = [{"prompt": "w1"}]
    assert trainer.floating_point_ops(prompts) == 0, "before the first completions"
    lengths = [(3, 5), (1, 1), (2, 9)]
    trainer.sampled_batches = [
        {"prompt_ids": torch.ones(4, prompt), "completion_ids": torch.ones(4, completion)}
        for prompt, completion in lengths
    ]
    for number in range(1, 6):
        trainer.micro_batches_done = number
        tokens = 4 * sum(lengths[(number - 1) % 3])
        assert trainer.floating_point_ops(prompts) == 6 * weights * tokens
    assert trainer.floating_point_ops({"input_ids": torch.ones(4, 7)}) == 0


def test_out_of_memory_while_sampling_names_the_size_of_a_generation(tmp_path):
    def fails(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=2))
    trainer.model.generate = fails
    with pytest.raises(ResourceError, match=r"`training.generation_batch_size`"):
        trainer.train()

    def fails_otherwise(*_, **__):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        trainer.sample(fails_otherwise)


@pytest.mark.slow
def test_a_roll_back_makes_completions_anew_without_the_prompts_that_are_left_out(
    tmp_path, monkeypatch
):
    check, bad = SpikeDetector.check, set(range(7, 12))

    def check_with_faults(self, step, figures):
        broken = step in bad
        bad.discard(step)
        return check(self, step, figures * torch.nan if broken else figures)

    monkeypatch.setattr(SpikeDetector, "check", check_with_faults)
    guard = {"loss_guard": {"name": "robust", "skips": 4, "window": 16}}
    checkpoints, answered = {"every_steps": 2, "keep": {"last": 9}}, []

    def make():
        trainer = quiet_trainer(
            bandit("grpo", tmp_path, steps=12, **SPREAD, safety=guard, checkpoints=checkpoints)
        )
        share_of = trainer.share_of
        trainer.share_of = lambda prompts: (
            answered.append([row["number"] for row in prompts]) or share_of(prompts)
        )
        return trainer

    trainer = train_to_the_end(make, restarts=1)
    assert trainer.rows_of_steps.left_out == [(12, 22)] and trainer.state.global_step == 12
    assert answered[:3] == [list(range(8)), list(range(8, 16)), list(range(16, 24))]
    # back at step 6, in the middle of a generation
    assert answered[3:] == [[8, 9, 10, 11, 22, 23, 24, 25], list(range(26, 34))]
    assert all(weight.isfinite().all() for weight in weights_of(trainer))


def test_steps_without_gradients_make_no_spike_of_one_with_but_what_is_not_finite_is_skipped(
    tmp_path,
):
    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=1))
    trainer.train()
    trainer.guard.detector = SpikeDetector(trainer.recipe.safety.loss_guard, torch.device("cpu"))
    for _ in range(20):
        assert not trainer.checked_step.check_metrics(torch.tensor([0.0, 0.0]))
    assert not trainer.checked_step.check_metrics(torch.tensor([3.0, 500.0]))
    for broken in ([torch.nan, 1.0], [0.0, torch.inf], [0.0, torch.nan]):
        assert trainer.checked_step.check_metrics(torch.tensor(broken))
    trainer.args.max_grad_norm = 0.0
    assert trainer.checked_step.check_metrics(torch.tensor([0.0, 500.0]))


def test_rewards_are_weighted_and_the_reference_stays_as_it_was(tmp_path):
    both = [
        {"name": "exact_match", "weight": 2.0},
        {"name": "length", "at_least": 1, "weight": 0.5},
    ]
    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=3, rewards=both, training={"beta": 0.1}))
    before = [weight.clone() for weight in weights_of(trainer)]
    trainer.train()
    reference = [parameter for _, parameter in sorted(trainer.ref_model.named_parameters())]
    assert all(
        torch.equal(a, b) and not a.requires_grad for a, b in zip(reference, before, strict=True)
    )
    logged = trainer.state.log_history[:3]
    assert logged[0]["kl"] == 0 and logged[-1]["kl"] > 0
    for entry in logged:
        parts = 2 * entry["rewards/exact_match/mean"] + 0.5 * entry["rewards/length/mean"]
        assert entry["reward"] == pytest.approx(parts) and entry["rewards/length/mean"] == 1


@pytest.mark.parametrize(
    ("stage", "training", "named"),
    [
        ("grpo", {"reward_weights": [1.0]}, "weight"),
        ("ppo", {"scale_rewards": "batch"}, "scale_rewards"),  # of groups, which others do not have
    ],
)
def test_options_without_effect_are_refused(stage, training, named, tmp_path):
    with pytest.raises(RecipeError, match=named):
        quiet_trainer(bandit(stage, tmp_path, steps=1, training=training))


def test_an_evaluation_has_rewards_and_draws_none_of_the_runs_random_numbers(tmp_path):
    training = {"num_generations_eval": 2, "per_device_eval_batch_size": 4}
    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=1, training=training))
    rows = [trainer.rows[number] for number in range(6)]
    trainer.held_out = {"questions": SimpleNamespace(rows=rows, form="prompt")}
    before = torch.random.get_rng_state()
    first, again = trainer.evaluate(), trainer.evaluate()
    assert torch.equal(torch.random.get_rng_state(), before) and first == again
    assert 0 <= first["eval_questions_rewards/exact_match/mean"] <= 1


# --- stages that answer each prompt once ---


@pytest.fixture
def single_answers(tmp_path):
    trainer = quiet_trainer(bandit("spo", tmp_path, steps=1))
    trainer.model.train()
    return trainer


@pytest.mark.parametrize(
    ("given", "generation"),
    [
        ({}, 5 * 3),
        ({"steps_per_generation": 6}, 5 * 6),
        ({"generation_batch_size": 45}, 45),
        ({"num_generations": 5}, 5 * 3),
    ],
)
def test_single_answers_are_compared_over_the_whole_batch(tmp_path, given, generation):
    """Each prompt still has one answer, unless the recipe asks for more."""
    sizes = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 3}
    config = SingleAnswers(output_dir=str(tmp_path), use_cpu=True, **sizes, **given)
    assert config.generation_batch_size == generation
    assert config.num_generations == given.get("num_generations", 1)
    assert config.least_deviation == 0.1


def test_advantages_are_made_in_training_alone(single_answers):
    trainer = single_answers
    trainer.advantages_of = lambda inputs, made: {"advantages": len(inputs)}
    assert trainer.scored([1, 2, 3], {"ids": 5}) == {"ids": 5, "advantages": 3}
    trainer.model.eval()
    assert trainer.scored([1, 2, 3], {"ids": 5}) == {"ids": 5}


def test_the_reward_of_a_row_is_a_weighted_sum_and_nan_where_none_applies(single_answers):
    trainer = single_answers
    trainer.reward_funcs = [
        lambda completions, **_: [1.0, None, None],
        lambda completions, **_: [2.0, 4.0, None],
    ]
    trainer.reward_func_names, trainer.reward_processing_classes = ["a", "b"], [None, None]
    trainer.reward_weights = torch.tensor([1.0, 0.5])
    trainer._calculate_rewards([{"prompt": "?"}] * 3, ["?"] * 3, ["!"] * 3, [[1]] * 3)
    assert trainer.rewards_of_all[:2].tolist() == [2.0, 2.0] and trainer.rewards_of_all[2].isnan()


def test_a_log_has_the_mean_of_a_stages_own_metric(single_answers):
    for value in (1.0, 2.0, 6.0):
        single_answers.add_metric("gap", value)
    single_answers.log({"loss": 1.0})
    assert single_answers.state.log_history[-1]["gap"] == 3.0


def test_log_probabilities_are_those_of_the_model(single_answers):
    trainer = single_answers
    trainer.prompts = [trainer.rows[number] for number in range(4)]
    made = trainer._generate_and_score_completions(trainer.share_of(trainer.prompts))
    ids = torch.cat((made["prompt_ids"], made["completion_ids"]), dim=1)
    logits = trainer.model(input_ids=ids).logits[:, made["prompt_ids"].size(1) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, made["completion_ids"][..., None])[..., 0]
    found = trainer.log_probabilities(made)
    assert torch.allclose(found, expected, atol=1e-5) and not found.requires_grad


TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture
def of_turns(tmp_path):
    """A trainer whose model always writes the token that ends a turn, which is not the tokenizer's EOS."""

    def build(stage, **training):
        tokenizer = words()
        tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
        tokenizer.chat_template = TEMPLATE
        model = {"from_scratch": True, "config": {**MODEL, "vocab_size": len(tokenizer)}}
        training = {"max_completion_length": 6, **training}
        recipe = bandit(stage, tmp_path, steps=1, model=model, training=training)
        trainer = quiet_trainer(recipe, tokenizer)
        end = tokenizer.vocab["<end>"]

        def write_end(module, inputs, logits):
            return logits + 1000 * torch.eye(logits.size(-1))[end]

        trainer.model.lm_head.register_forward_hook(write_end)
        return trainer, end

    return build


@pytest.mark.parametrize("stage", ["grpo", "rloo", "ppo", "spo"])
def test_a_completion_ends_with_its_turn_and_counts_as_terminated(of_turns, stage):
    trainer, end = of_turns(stage)
    trainer.model.train()
    trainer.prompts = [trainer.rows[number] for number in range(4)]
    made = trainer._generate_and_score_completions(trainer.share_of(trainer.prompts))
    assert made["completion_ids"].tolist() == [[end]] * len(made["completion_ids"])
    assert trainer.trl_metrics["train"]["completions/clipped_ratio"] == [0.0]


def test_vllm_is_given_the_ends_of_answers_unless_the_recipe_has_other_stops(of_turns):
    trainer, end = of_turns("grpo")
    arguments = SimpleNamespace(use_vllm=True, generation_kwargs={"seed": 1})
    end_answers_at_turns(trainer.recipe, trainer.model, trainer._tokenizer, arguments)
    eos = trainer._tokenizer.eos_token_id
    assert arguments.generation_kwargs == {"seed": 1, "stop_token_ids": [eos, end]}
