"""Losses and gradients of steps on sampled answers, by the formulas of papers.

Twelve answers to four prompts are used by four steps of two micro-batches, so that the last steps are off policy.
"""

import math

import pytest
import torch
import trl
from datasets import Dataset
from stages import formulas
from stages.test_values import save_teacher
from taken_steps import assert_computed
from tiny_generations import (
    LONGEST,
    TEMPERATURE,
    assert_clipped,
    generations,
    samples_of,
    samples_of_step,
    score,
    steps_on_samples,
)
from tiny_rewards import WORDS, words

pytestmark = pytest.mark.heavy
BETA, LOW, HIGH = 0.04, 0.1, 0.25
GROUPS = {"num_generations": 3, "steps_per_generation": 4, "num_iterations": 2}
GROUPS |= {"beta": BETA, "epsilon": LOW, "epsilon_high": HIGH}


def advantages_in_groups(samples, formula, rewards):
    """Of each sample, among the answers to its prompt; 0 where no reward applies."""
    found = dict.fromkeys(samples, 0.0)
    for prompt in {sample.prompt for sample in samples}:
        scored = [one for one in samples if one.prompt == prompt and not math.isnan(one.reward)]
        if len(scored) > 1:
            advantages = formula(torch.tensor([[rewards[sample] for sample in scored]]).double())
            found |= dict(zip(scored, advantages[0].tolist(), strict=True))
    return found


# --- GRPO and its variants ---


def clipped(new, old, advantage):
    return formulas.clipped_policy((new - old).exp(), advantage, LOW, HIGH)


def of_sequence(new, old, advantage):
    """GSPO, arXiv 2507.18071, equations 5 and 7: a ratio of whole answers, to the power of 1 / length."""
    ratio = (new - old).mean().exp()
    return formulas.clipped_policy(ratio, advantage, LOW, HIGH).expand(len(new))


def from_both_sides(new, old, advantage):
    """INTELLECT-2, arXiv 2505.07291: the unclipped ratio is at most delta."""
    ratio = (new - old).exp()
    bounded = ratio.clamp(max=2.0) * advantage
    return -torch.minimum(bounded, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)


def cispo(new, old, advantage):
    """CISPO, arXiv 2506.13585, equations 4 and 5; TRL's upper bound is epsilon_high itself, and there is no lower."""
    return -(new - old).exp().clamp(max=HIGH).detach() * advantage * new


def sapo(new, old, advantage):
    """SAPO, arXiv 2511.20347: a sigmoid in place of the clip, colder for negative advantages."""
    tau = 1.0 if advantage > 0 else 1.05
    return -4 / tau * (tau * ((new - old).exp() - 1)).sigmoid() * advantage


def mean_of_answers(micro_batches, made):
    """GRPO, arXiv 2402.03300, equation 3."""
    flat = [losses.mean() for batch in micro_batches for losses in batch]
    return sum(flat) / len(flat)


def mean_of_micro_batches(micro_batches, made):
    """Each by its own tokens."""
    return sum(torch.cat(batch).mean() for batch in micro_batches) / len(micro_batches)


def share_of_generation(micro_batches, made):
    """DAPO, arXiv 2503.14476, equation 8: over tokens, as many as a step of the generation has on average."""
    return sum(torch.cat(batch).sum() for batch in micro_batches) / made.tokens_of_step


def over_longest(micro_batches, made):
    """Dr. GRPO, arXiv 2503.20783, with the longest allowed answer as its constant."""
    return sum(torch.cat(batch).sum() for batch in micro_batches) / (
        len(made.samples) / made.parts * LONGEST
    )


PAPER = {"use_bias_correction_kl": False}
VARIANTS = {
    "grpo": (clipped, mean_of_answers, PAPER),
    "bnpo": (clipped, mean_of_micro_batches, {}),
    "dapo": (clipped, share_of_generation, {}),
    "dr_grpo": (clipped, over_longest, {}),
    "cispo": (cispo, share_of_generation, {}),
    "sapo": (sapo, mean_of_answers, {}),
    "gspo": (of_sequence, mean_of_answers, {"importance_sampling_level": "sequence"}),
    "delta": (from_both_sides, share_of_generation, {"delta": 2.0}),
}
LOSS_TYPES = {"gspo": "grpo", "delta": "dapo"}


def weight_of_divergence(name, log_ratio):
    """DeepSeek-V3.2, arXiv 2512.02556, which TRL follows unless told otherwise: the ratio, with its gradient."""
    return log_ratio.mean().exp() if name == "gspo" else log_ratio.exp()


@pytest.mark.parametrize("name", VARIANTS)
def test_steps_of_grpo_are_the_papers(name, tmp_path):
    check_grpo(name, steps_on_samples("grpo", tmp_path, steps=4, **keys_of(name), **GROUPS))


def test_positions_of_padded_prompts_begin_after_the_padding(tmp_path):
    """GPT-2's positions are absolute."""
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": WORDS + 4}
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = {"model_type": "gpt2", **shape, **without}
    options = {**keys_of("dapo"), **GROUPS, "learning_rate": 1e-3, "config": config, "seed": 1}
    check_grpo("dapo", steps_on_samples("grpo", tmp_path, steps=4, **options))


def keys_of(name):
    return {"loss_type": LOSS_TYPES.get(name, name), **VARIANTS[name][2]}


def check_grpo(name, taken, **lengths):
    token_losses, total, options = VARIANTS[name]
    (made,) = generations(taken, **lengths)
    samples = made.samples
    rewards = {sample: sample.reward for sample in samples}
    advantages = advantages_in_groups(samples, formulas.within_groups, rewards)
    old, reference = made.read(made.sampling), made.read(taken.reference)
    ratios = []
    for step in made.steps:
        model, micro_batches = taken.model(step.weights), []
        for batch in map(samples_of, step.micro_batches):
            micro_batches.append([])
            for sample in batch:
                new, _ = sample.read_by(model)
                losses = token_losses(new, old[sample], advantages[sample])
                divergence = formulas.divergence_of_tokens(new, reference[sample])
                if options is not PAPER:
                    divergence = divergence * weight_of_divergence(name, new - old[sample])
                micro_batches[-1].append(losses + BETA * divergence)
                ratios += [(one, advantages[sample]) for one in (new - old[sample]).exp().tolist()]
        assert_computed(step, total(micro_batches, made), model)
    assert_clipped(*zip(*ratios, strict=True), LOW, HIGH)


# --- RLOO ---

RLOO = {**GROUPS, "learning_rate": 5e-4}


def test_steps_of_rloo_are_the_papers(tmp_path):
    check_rloo(steps_on_samples("rloo", tmp_path, steps=4, **RLOO))


def check_rloo(taken, **lengths):
    """The divergence is in the rewards; ratios are those of whole answers (arXiv 2402.14740)."""
    (made,) = generations(taken, **lengths)
    samples = made.samples
    old, reference = made.read(made.sampling), made.read(taken.reference)
    rewards = {
        sample: sample.reward - BETA * float((old[sample] - reference[sample]).sum())
        for sample in samples
    }
    advantages = advantages_in_groups(samples, formulas.leave_one_out, rewards)
    ratios = []
    for step in made.steps:
        model, losses = taken.model(step.weights), []
        for sample in samples_of_step(step):
            new, _ = sample.read_by(model)
            ratio = (new.sum() - old[sample].sum()).exp()
            losses.append(formulas.clipped_policy(ratio, advantages[sample], LOW, HIGH))
            ratios.append((ratio.item(), advantages[sample]))
        assert_computed(step, sum(losses) / len(losses), model)
    assert_clipped(*zip(*ratios, strict=True), LOW, HIGH)


# --- a teacher of sampled answers ---


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_step_of_distillation_on_policy_is_the_papers_mean_over_its_tokens(beta, tmp_path):
    teacher = save_teacher(tmp_path / "teacher", WORDS + 4)
    given = {"teacher_model_name_or_path": str(tmp_path / "teacher"), "beta": beta}
    taken = steps_on_samples("distill_on_policy", tmp_path, steps=1, **given)
    check_on_policy(taken, teacher, beta)


def check_on_policy(taken, teacher, beta):
    (step,), parts = taken.steps, []
    model = taken.model(step.weights)
    for sample in samples_of_step(step):
        with torch.no_grad():
            _, taught = sample.read_by(teacher)
        _, own = sample.read_by(model)
        parts.append(formulas.jensen_shannon(own.exp(), taught.exp(), beta))
    assert len({len(part) for part in parts}) > 2
    assert_computed(step, torch.cat(parts).mean(), model)


# --- TRL's own trainers, on the same micro-batches ---

TRLS = {
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, GROUPS | keys_of("dapo")),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig, GROUPS),
    "distill_on_policy": (trl.DistillationTrainer, trl.DistillationConfig, {"beta": 0.3}),
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", TRLS)
def test_a_step_is_that_of_trls_own_trainer(stage, tmp_path):
    theirs, config, options = TRLS[stage]
    if stage == "distill_on_policy":
        own = {"teacher_model": save_teacher(tmp_path / "teacher", WORDS + 4).float()}
        named = {"teacher_model_name_or_path": str(tmp_path / "teacher")}
    else:
        own, named = {"reward_funcs": score}, {}
    taken = steps_on_samples(stage, tmp_path, steps=2, **options, **named)
    step = taken.steps[-1]  # of answers that the model before the first step sampled
    model = taken.model(step.weights).float()
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    sizes |= {"max_completion_length": LONGEST, "temperature": TEMPERATURE, "bf16": False}
    if stage != "distill_on_policy":
        sizes["beta"] = (
            0.0  # otherwise it loads a reference by name; the batch has what it predicts
        )
    other = theirs(
        model=model,
        args=config(output_dir=str(tmp_path), use_cpu=True, **options | sizes),
        train_dataset=Dataset.from_list([{"prompt": "w1"}] * 12),
        processing_class=words(),
        **own,
    )
    other.beta, other.current_gradient_accumulation_steps = options["beta"], 2
    losses = [other.compute_loss(model.train(), dict(batch)) for batch in step.micro_batches]
    scale = 2 if stage == "rloo" else 1  # the others divide by it themselves
    assert_computed(step, sum(losses) / scale, model)
