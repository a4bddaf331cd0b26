"""Losses and gradients of steps of PPO and SPO, by the formulas of papers.

Twelve answers are used by four steps of two micro-batches, so that the last steps are off policy.
"""

import pytest
import torch
from stages import formulas
from taken_steps import assert_computed
from tiny_generations import assert_clipped, generations, samples_of_step, steps_on_samples
from torch import nn

from cpt.stages.generating import STAGE_FILE

pytestmark = pytest.mark.heavy
BETA, LOW, HIGH = 0.04, 0.1, 0.25
ONES = {"steps_per_generation": 4, "num_iterations": 2}
ONES |= {"beta": BETA, "epsilon": LOW, "epsilon_high": HIGH}
PAD, EOS = 1, 3


def policy_losses(new, old, reference, advantages):
    """Clipped, with the divergence to the reference by DeepSeek-V3.2's estimate (arXiv 2512.02556)."""
    ratio = (new - old).exp()
    divergence = formulas.divergence_of_tokens(new, reference) * ratio
    return formulas.clipped_policy(ratio, advantages, LOW, HIGH) + BETA * divergence


# --- PPO ---

GAMMA, LAM, CLIP, SPEED, COEFFICIENT = 0.9, 0.7, 0.05, 3.0, 0.4
PPO = {"gamma": GAMMA, "lam": LAM, "value_clip": CLIP, "value_speed": SPEED}
PPO |= {"value_coefficient": COEFFICIENT}


def with_head(model, step):
    """The model with the step's value head."""
    model.value_head = nn.Linear(model.config.hidden_size, 1, dtype=torch.float64)
    model.value_head.load_state_dict(
        {name: step.weights[f"value_head.{name}"] for name in ("weight", "bias")}
    )
    return model


def values_of(sample, model):
    """Of the states before each token of the answer: [T]."""
    ids = torch.tensor([[*sample.prompt, *sample.answer]])
    states = model.model(input_ids=ids).last_hidden_state[0, len(sample.prompt) - 1 : -1]
    return SPEED * model.value_head(states)[:, 0]


@pytest.mark.parametrize("masks", [False, True], ids=["truncated answers", "without them"])
@pytest.mark.parametrize("whitens", [False, True], ids=["plain", "whitened"])
def test_steps_of_ppo_are_the_papers(masks, whitens, tmp_path):
    options = {"mask_truncated_completions": masks, "whiten_advantages": whitens}
    taken = steps_on_samples("ppo", tmp_path, steps=4, **ONES, **PPO, **options)
    check_ppo(taken, masks=masks, whitens=whitens)


def check_ppo(taken, *, masks, whitens):
    (made,) = generations(taken)
    for sample in made.samples:
        assert sample.learned == (not masks or sample.answer[-1] in (PAD, EOS))
    samples = [sample for sample in made.samples if sample.learned]
    tokens = sum(len(sample.answer) for sample in samples)
    old, reference = made.read(made.sampling), made.read(taken.reference)
    sampling = with_head(made.sampling, made.steps[0])
    with torch.no_grad():
        before = {sample: values_of(sample, sampling) for sample in samples}
    scored = [sample for sample in samples if sample.reward == sample.reward]
    assert masks or len(scored) < len(samples)  # answers without a reward have no advantages
    advantages = {sample: torch.zeros(len(sample.answer)).double() for sample in samples}
    for sample in scored:
        found = formulas.generalized_advantages(sample.reward, before[sample].tolist(), GAMMA, LAM)
        advantages[sample] = torch.tensor(found).double()
    returns = {sample: before[sample] + advantages[sample] for sample in samples}
    if whitens:
        together = torch.cat([advantages[sample] for sample in scored])
        parts = formulas.normalized(together, 0.1).split([len(one.answer) for one in scored])
        advantages |= dict(zip(scored, parts, strict=True))
    moved, ratios = [], []
    for step in made.steps:
        model, losses = with_head(taken.model(step.weights), step), []
        for sample in samples_of_step(step):
            if not sample.learned:
                continue
            new, _ = sample.read_by(model)
            values = values_of(sample, model)
            losses += [
                policy_losses(new, old[sample], reference[sample], advantages[sample]).sum(),
                COEFFICIENT
                * formulas.clipped_values(values, before[sample], returns[sample], CLIP).sum(),
            ]
            steps_away = ((new - old[sample]).exp().tolist(), advantages[sample].tolist())
            ratios += zip(*steps_away, strict=True)
            moved += (values - before[sample]).tolist()
        # a step has half the answers of the generation
        assert_computed(step, sum(losses) / (tokens / 2), model)
    assert_clipped(*zip(*ratios, strict=True), LOW, HIGH)
    assert min(moved) < -CLIP and max(moved) > CLIP


# --- SPO ---

SPO = {"half_life": 2.0, "rho_min": 0.5, "rho_max": 0.99}


def test_steps_of_spo_are_the_papers(tmp_path):
    check_spo(steps_on_samples("spo", tmp_path, steps=8, **ONES, **SPO))


def check_spo(taken):
    """Of two generations: four prompts of the second were in the first."""
    tracked, drift, last = {}, 0.0, None
    for made in generations(taken):
        if last is not None:
            before, after = last.read(last.sampling), last.read(made.sampling)
            drift += formulas.drift(before, after)
        prior = sum(map(formulas.value, tracked.values())) / len(tracked) if tracked else 0.5
        scored = [sample for sample in made.samples if sample.reward == sample.reward]
        values = {
            one: formulas.value(tracked[one.prompt]) if one.prompt in tracked else prior
            for one in scored
        }
        surprise = torch.tensor([one.reward - values[one] for one in scored]).double()
        advantages = dict.fromkeys(made.samples, 0.0)
        advantages |= zip(scored, formulas.normalized(surprise, 0.1).tolist(), strict=True)
        for sample in scored:
            known = tracked.get(sample.prompt)
            if known is None:  # 1 / (1 - rho_min) answers of the prior
                known = (2 * prior, 2 * (1 - prior), drift)
            rho = min(max(2 ** (-(drift - known[2]) / 2.0), 0.5), 0.99)
            tracked[sample.prompt] = (*formulas.learned(known, sample.reward, rho), drift)
        old, reference = made.read(made.sampling), made.read(taken.reference)
        tokens = sum(len(sample.answer) for sample in made.samples)
        for step in made.steps:
            model, losses = taken.model(step.weights), []
            for sample in samples_of_step(step):
                new, _ = sample.read_by(model)
                losses.append(
                    policy_losses(new, old[sample], reference[sample], advantages[sample]).sum()
                )
            assert_computed(step, sum(losses) / (tokens / 2), model)
        last = made
    found = sorted(taken.states[STAGE_FILE]["figures"][:, 0].tolist())
    assert found == pytest.approx(sorted(map(formulas.value, tracked.values())), rel=1e-5)
    assert len(tracked) < 20 and 0.1 < drift < 1.9
