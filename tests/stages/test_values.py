"""Losses and gradients of a run's step, for each stage that learns from examples, by the formulas of papers.

A step has two micro-batches of three examples of unequal lengths. The padding token is the one that ends answers.
"""

import functools
import random

import pytest
import torch
import trl
from datasets import Dataset
from example_runs import build_run
from stages import formulas
from stages.formulas import Answers
from taken_steps import SIZES, assert_computed, log_probabilities, steps_on_examples
from tiny import TINY_LLAMA
from tiny_models import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from trl.experimental import cpo, orpo

from cpt.hf_internals import IGNORED

pytestmark = pytest.mark.heavy
EPSILON = 0.15


def words_of(draw: random.Random, at_most: int) -> list[int]:
    return [draw.randrange(10, 90) for _ in range(draw.randrange(1, at_most))]


def pairs() -> list[dict]:
    draw = random.Random(3)
    return [
        {
            "prompt_ids": words_of(draw, 9),
            "chosen_ids": [*words_of(draw, 7), 2],
            "rejected_ids": [*words_of(draw, 12), 2],
        }
        for _ in range(6)
    ]


def answers(row_ids, model, reference=None) -> Answers:
    """Read (prompt, answer) by the models, one after the other."""
    found = Answers([])
    for prompt, answer in row_ids:
        tokens, every = log_probabilities(model, prompt + answer)
        found.policy.append(tokens[len(prompt) - 1 :])
        found.probabilities.append(every[len(prompt) - 1 :].exp())
        found.prompt.append(tokens[: len(prompt) - 1])
        if reference is not None:
            with torch.no_grad():
                tokens, _ = log_probabilities(reference, prompt + answer)
            found.reference.append(tokens[len(prompt) - 1 :])
    return found


def halves(rows):
    return rows[:3], rows[3:]


PREFERENCES = {
    "dpo-sigmoid": formulas.dpo,
    "dpo-hinge": formulas.hinge,
    "dpo-ipo": formulas.ipo,
    "dpo-exo_pair": functools.partial(formulas.exo_pair, epsilon=EPSILON),
    "dpo-nca_pair": formulas.nca_pair,
    "dpo-robust": functools.partial(formulas.robust, epsilon=EPSILON),
    "dpo-bco_pair": formulas.bco_pair,
    "dpo-sppo_hard": formulas.sppo_hard,
    "dpo-aot": functools.partial(formulas.aot, epsilon=EPSILON),
    "dpo-aot_unpaired": functools.partial(formulas.aot_unpaired, epsilon=EPSILON),
    "dpo-apo_zero": formulas.apo_zero,
    "dpo-apo_down": formulas.apo_down,
    "dpo-discopop": functools.partial(formulas.discopop, tau=0.07),
    "dpo-sft": lambda better, worse, beta: formulas.mean_of_tokens(better),
    "dpo-sigmoid_norm": formulas.sigmoid_norm,
    "dpo-forward": functools.partial(formulas.f_dpo, slope=lambda ratio: -1 / ratio),
    "dpo-js": functools.partial(
        formulas.f_dpo, slope=lambda ratio: (2 * ratio / (1 + ratio)).log()
    ),
    "dpo-alpha": functools.partial(formulas.f_dpo, slope=lambda ratio: (1 - ratio**-0.4) / 0.4),
    "dpo-lengths": functools.partial(formulas.ld_dpo, alpha=0.25),
    "dpo-weighted": formulas.wpo,
    "orpo": formulas.orpo,
    "cpo-sigmoid": functools.partial(formulas.cpo, alpha=0.7),
    "cpo-simpo": functools.partial(formulas.simpo, gamma=0.4),
}
OPTIONS = {
    "dpo-exo_pair": {"label_smoothing": EPSILON},
    "dpo-robust": {"label_smoothing": EPSILON},
    "dpo-aot": {"label_smoothing": EPSILON},
    "dpo-aot_unpaired": {"label_smoothing": EPSILON},
    "dpo-discopop": {"discopop_tau": 0.07},
    "dpo-forward": {"f_divergence_type": "forward_kl"},
    "dpo-js": {"f_divergence_type": "js_divergence"},
    "dpo-alpha": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1 - 0.4},
    "dpo-lengths": {"ld_alpha": 0.25},
    "dpo-weighted": {"use_weighting": True},
    "cpo-sigmoid": {"cpo_alpha": 0.7},
    "cpo-simpo": {"cpo_alpha": 0.0, "simpo_gamma": 0.4},
}
OF_SIGMOID = ("forward", "js", "alpha", "lengths", "weighted")  # options of the default loss


def options_of(name) -> tuple[str, dict]:
    """Its stage and keys."""
    stage, _, kind = name.partition("-")
    training = OPTIONS.get(name, {}) | {"beta": 0.3}
    if kind and kind not in OF_SIGMOID:
        training["loss_type"] = [kind] if stage == "dpo" else kind
    return stage, training


USUAL = ("dpo-sigmoid", "dpo-ipo", "dpo-robust", "dpo-sft", "orpo", "cpo-sigmoid", "cpo-simpo")


@pytest.mark.parametrize(
    "name",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in PREFERENCES],
)
def test_a_step_on_pairs_is_the_papers(name, tmp_path):
    stage, training = options_of(name)
    check_pairs(name, steps_on_examples(stage, tmp_path, pairs(), **training))


def check_pairs(name, taken):
    (step,), losses = taken.steps, []
    model, reference = taken.model(step.weights), taken.reference
    for half in halves(pairs()):
        better, worse = (
            answers([(row["prompt_ids"], row[side]) for row in half], model, reference)
            for side in ("chosen_ids", "rejected_ids")
        )
        losses.append(PREFERENCES[name](better, worse, beta=0.3))
    assert_computed(step, sum(losses) / 2, model)


# --- single answers, scores ---


def rated() -> list[dict]:
    """Both kinds in one half, and one in the other."""
    labels = [True, False, False, True, True, True]
    return [
        {"prompt_ids": row["prompt_ids"], "completion_ids": row["rejected_ids"], "label": label}
        for row, label in zip(pairs(), labels, strict=True)
    ]


KTO = {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.6}


def test_a_step_on_rated_answers_is_the_papers(tmp_path):
    """The divergence of a micro-batch is that of each prompt with the answer to the one before it."""
    found = check_rated(steps_on_examples("kto", tmp_path, rated(), seed=3, **KTO))
    assert found[0] == 0 and found[1] > 0.1  # the first was negative


def check_rated(taken, *, together=False):
    """Return the divergence of each half; `together`, both have that of all rows."""
    (step,) = taken.steps
    model, reference = taken.model(step.weights), taken.reference
    read, others = [], []
    for half in halves(rated()):
        prompts, said = ([row[name] for row in half] for name in ("prompt_ids", "completion_ids"))
        read.append(answers(zip(prompts, said, strict=True), model, reference))
        mismatched = zip(prompts, said[-1:] + said[:-1], strict=True)
        others.append(answers(mismatched, model, reference).log_ratio)
    if together:
        others = [torch.cat(others)] * 2
    divergences = [formulas.divergence_of_others(ratios) for ratios in others]
    losses = []
    for own, divergence, half in zip(read, divergences, halves(rated()), strict=True):
        is_good = torch.tensor([row["label"] for row in half])
        losses.append(formulas.kto(own, is_good, divergence, 0.3, 1.3, 0.6))
    assert_computed(step, sum(losses) / 2, model)
    return divergences


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_in_bf16_the_reference_is_exactly_the_model_at_its_start(stage, tmp_path):
    rows = rated() if stage == "kto" else pairs()
    trainer = build_run(stage, tmp_path, steps=1, rows=rows, training={**SIZES, "bf16": True})
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["rewards/chosen"] == logged["rewards/rejected"] == logged.get("kl", 0) == 0


def test_a_step_of_a_reward_model_is_the_papers(tmp_path):
    """The score is that of the last token that is not the padding token, which ends answers here."""
    taken = steps_on_examples("reward", tmp_path, pairs(), center_rewards_coefficient=0.2)
    (step,) = taken.steps
    model = taken.model(step.weights)

    def scores(half, side):
        read = [torch.tensor([row["prompt_ids"] + row[side][:-1]]) for row in half]
        return torch.cat([model.score(model.model(ids).last_hidden_state[:, -1]) for ids in read])

    losses = [
        formulas.bradley_terry(scores(half, "chosen_ids"), scores(half, "rejected_ids"), 0.2)
        for half in halves(pairs())
    ]
    assert_computed(step, sum(losses) / 2, model)


# --- a teacher ---


def conversations() -> list[dict]:
    """Rows as `packing: none` makes them: one conversation, whose answer is learned, and padding."""
    rows = []
    for pair in pairs():
        prompt, answer = pair["prompt_ids"], pair["rejected_ids"]
        padding = 64 - len(prompt) - len(answer)
        hidden = [IGNORED] * len(prompt)
        positions = [*range(len(prompt) + len(answer)), *range(padding)]
        columns = {
            "input_ids": [*prompt, *answer, *[2] * padding],
            "labels": [*hidden, *answer, *[IGNORED] * padding],
            "position_ids": positions,
        }
        rows.append({name: torch.tensor(column) for name, column in columns.items()})
    return rows


def save_teacher(folder, vocab_size=96):
    """Wider than the student, and sure of what it says."""
    torch.manual_seed(7)
    shape = {"hidden_size": 48, "vocab_size": vocab_size, "initializer_range": 0.3}
    model = LlamaForCausalLM(LlamaConfig(**{**TINY_LLAMA, **shape}))
    model.save_pretrained(folder)
    return model.double().eval()


def divergences(model, teacher, line, beta, temperature=1.0):
    """Of the learned tokens of one sequence, given with its labels and its mask."""
    ids, labels, mask = line
    kept = mask.bool()
    with torch.no_grad():
        _, taught = log_probabilities(teacher, ids[kept].tolist(), temperature=temperature)
    _, own = log_probabilities(model, ids[kept].tolist(), temperature=temperature)
    learned = labels[kept][1:] != IGNORED
    return formulas.jensen_shannon(own.exp(), taught.exp(), beta)[learned]


def taught_by(folder, stage, beta):
    """Keys of a step with a teacher; GKD's temperature is of sampling alone."""
    keys = {"teacher_model_name_or_path": str(folder), "beta": beta, "temperature": 0.8}
    return keys | ({"lmbda": 0.0} if stage == "gkd" else {})


UNPACKED = {"packing": "none"}


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("stage", ["distill", "gkd"])
def test_a_step_with_a_teacher_is_the_papers_mean_over_the_steps_tokens(stage, beta, tmp_path):
    teacher = save_teacher(tmp_path / "teacher")
    given = taught_by(tmp_path / "teacher", stage, beta)
    taken = steps_on_examples(stage, tmp_path, conversations(), data=UNPACKED, **given)
    check_taught(taken, teacher, beta, temperature=0.8 if stage == "distill" else 1.0)


def check_taught(taken, teacher, beta, temperature):
    (step,) = taken.steps
    model = taken.model(step.weights)
    lines = map(line_of, conversations())
    parts = [divergences(model, teacher, line, beta, temperature) for line in lines]
    assert_computed(step, torch.cat(parts).mean(), model)


def line_of(row):
    """Ids, labels and mask of a row."""
    length = int((row["position_ids"].diff() == 1).long().cumprod(0).sum()) + 1
    return row["input_ids"], row["labels"], torch.arange(64) < length


@pytest.mark.parametrize("smoothing", [0.0, EPSILON])
def test_a_step_on_conversations_is_the_papers_mean_over_the_steps_tokens(smoothing, tmp_path):
    options = {"data": UNPACKED, "label_smoothing_factor": smoothing}
    taken = steps_on_examples("sft", tmp_path, conversations(), **options)
    (step,), parts = taken.steps, []
    model = taken.model(step.weights)
    for ids, labels, mask in map(line_of, conversations()):
        tokens, every = log_probabilities(model, ids[mask].tolist())
        learned = labels[mask][1:] != IGNORED
        parts.append(formulas.smoothed_cross_entropy(tokens, every, smoothing)[learned])
    assert_computed(step, torch.cat(parts).mean(), model)


def test_answers_that_gkd_samples_count_by_their_own_tokens(tmp_path):
    teacher = save_teacher(tmp_path / "teacher")
    given = taught_by(tmp_path / "teacher", "gkd", 0.3) | {"lmbda": 1.0, "max_new_tokens": 40}
    taken = steps_on_examples("gkd", tmp_path, conversations(), data=UNPACKED, **given)
    check_sampled_by_gkd(taken, teacher)


def check_sampled_by_gkd(taken, teacher):
    """A micro-batch does not know how many tokens the others will sample: each counts as much."""
    (step,), losses, lengths = taken.steps, [], []
    model = taken.model(step.weights)
    for batch in step.micro_batches:
        lines = zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
        parts = torch.cat([divergences(model, teacher, line, beta=0.3) for line in lines])
        losses.append(parts.mean())
        lengths.append(len(parts))
    assert len(losses) == 2 and lengths[0] != lengths[1]
    assert_computed(step, sum(losses) / 2, model)


# --- TRL's own trainers, on the same micro-batches ---

TRLS = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {"beta": 0.3}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, {"beta": 0.3, "undesirable_weight": 0.6}),
    "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig, {"beta": 0.3}),
    "cpo": (cpo.CPOTrainer, cpo.CPOConfig, {"beta": 0.3, "cpo_alpha": 0.7}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, {"center_rewards_coefficient": 0.2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", TRLS)
def test_a_step_is_that_of_trls_own_trainer(stage, tmp_path):
    theirs, config, options = TRLS[stage]
    rows = rated() if stage == "kto" else pairs()
    taken = steps_on_examples(stage, tmp_path, rows, **options)
    (step,) = taken.steps
    model = taken.model(step.weights).float().train()
    text = {"prompt": "w3", "completion": "w4", "label": True, "chosen": "w4", "rejected": "w5"}
    answered = ("completion", "label") if stage == "kto" else ("chosen", "rejected")
    row = {name: text[name] for name in ("prompt", *answered)}
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    other = theirs(
        model=model,
        args=config(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options),
        train_dataset=Dataset.from_list([row, row]),
        processing_class=tokenizer,
        **({"ref_model": taken.reference.float()} if stage in ("dpo", "kto") else {}),
    )
    losses = [other.compute_loss(model, dict(batch)) for batch in step.micro_batches]
    assert_computed(step, sum(losses) / 2, model)
