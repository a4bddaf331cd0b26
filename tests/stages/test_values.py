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
from taken_steps import assert_computed, independent, log_probabilities, move, take_steps
from tiny import TINY_LLAMA
from tiny_models import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from trl.experimental import cpo, orpo

from cpt.data.rows.packing import IGNORED

pytestmark = pytest.mark.heavy
SIZES = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1}
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


def one_step(stage, folder, rows, *, data=None, seed=1, **training):
    """The step, and independent models with its weights and with those before it was moved."""
    training = {**SIZES, **training}
    trainer = build_run(stage, folder, steps=1, rows=rows, data=data, training=training)
    before = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    move(trainer.model, seed=seed)
    (step,) = take_steps(trainer)
    assert len(step.micro_batches) == 2
    config, build = trainer.model.config, type(trainer.model)
    models = (independent(config, weights, build) for weights in (step.weights, before))
    return step, *models


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


@pytest.mark.parametrize("name", PREFERENCES)
def test_a_step_on_pairs_is_the_papers(name, tmp_path):
    stage, _, kind = name.partition("-")
    training = OPTIONS.get(name, {}) | {"beta": 0.3}
    if kind and kind not in OF_SIGMOID:
        training["loss_type"] = [kind] if stage == "dpo" else kind
    rows = pairs()
    step, model, reference = one_step(stage, tmp_path, rows, **training)
    losses = []
    for half in halves(rows):
        better, worse = (
            answers([(row["prompt_ids"], row[side]) for row in half], model, reference)
            for side in ("chosen_ids", "rejected_ids")
        )
        losses.append(PREFERENCES[name](better, worse, beta=0.3))
    assert_computed(step, sum(losses) / 2, model)


# --- single answers, scores ---


def test_a_step_on_rated_answers_is_the_papers(tmp_path):
    """The divergence is that of each prompt with the answer to the one before it."""
    labels = [True, False, False, True, True, True]
    rows = [
        {"prompt_ids": row["prompt_ids"], "completion_ids": row["rejected_ids"], "label": label}
        for row, label in zip(pairs(), labels, strict=True)
    ]
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.6}
    step, model, reference = one_step("kto", tmp_path, rows, beta=0.3, seed=0, **weights)
    losses, divergences = [], []
    for half in halves(rows):
        prompts, said = ([row[name] for row in half] for name in ("prompt_ids", "completion_ids"))
        others = answers(zip(prompts, said[-1:] + said[:-1], strict=True), model, reference)
        divergences.append(formulas.mismatched_divergence(others))
        own = answers(zip(prompts, said, strict=True), model, reference)
        is_good = torch.tensor([row["label"] for row in half])
        losses.append(formulas.kto(own, is_good, divergences[-1], 0.3, 1.3, 0.6))
    assert divergences[0] > 0.1 and divergences[1] == 0  # it was negative
    assert_computed(step, sum(losses) / 2, model)


def test_a_step_of_a_reward_model_is_the_papers(tmp_path):
    """The score is that of the last token that is not the padding token, which ends answers here."""
    rows = pairs()
    step, model, _ = one_step("reward", tmp_path, rows, center_rewards_coefficient=0.2)

    def scores(half, side):
        read = [torch.tensor([row["prompt_ids"] + row[side][:-1]]) for row in half]
        return torch.cat([model.score(model.model(ids).last_hidden_state[:, -1]) for ids in read])

    losses = [
        formulas.bradley_terry(scores(half, "chosen_ids"), scores(half, "rejected_ids"), 0.2)
        for half in halves(rows)
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


@pytest.fixture
def teacher(tmp_path):
    """Wider than the student, and sure of what it says."""
    torch.manual_seed(7)
    shape = {"hidden_size": 48, "vocab_size": 96, "initializer_range": 0.3}
    model = LlamaForCausalLM(LlamaConfig(**{**TINY_LLAMA, **shape}))
    model.save_pretrained(tmp_path / "teacher")
    return model.double().eval()


def divergences(model, teacher, ids, learned, beta, temperature=1.0):
    """Of the learned tokens of one sequence; `learned` is theirs."""
    with torch.no_grad():
        _, taught = log_probabilities(teacher, ids, temperature=temperature)
    _, own = log_probabilities(model, ids, temperature=temperature)
    return formulas.jensen_shannon(own.exp(), taught.exp(), beta)[learned]


def learned_part(ids, labels, mask):
    """A sequence without its padding, and which of its tokens but the first are learned."""
    kept = mask.bool()
    return ids[kept].tolist(), labels[kept][1:] != IGNORED


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("stage", ["distill", "gkd"])
def test_a_step_with_a_teacher_is_the_papers_mean_over_the_steps_tokens(
    stage, beta, teacher, tmp_path
):
    rows = conversations()
    given = {"teacher_model_name_or_path": str(tmp_path / "teacher"), "beta": beta}
    given |= {"temperature": 0.8} | ({"lmbda": 0.0} if stage == "gkd" else {})
    step, model, _ = one_step(stage, tmp_path, rows, data={"packing": "none"}, **given)
    temperature = 0.8 if stage == "distill" else 1.0  # TRL's is of sampling alone
    parts = []
    for row in rows:
        length = int((row["position_ids"].diff() == 1).long().cumprod(0).sum()) + 1
        mask = torch.arange(64) < length
        ids, learned = learned_part(row["input_ids"], row["labels"], mask)
        parts.append(divergences(model, teacher, ids, learned, beta, temperature))
    assert_computed(step, torch.cat(parts).mean(), model)


def test_answers_that_the_student_samples_count_by_their_own_tokens(teacher, tmp_path):
    """GKD's micro-batches do not know how many tokens the others will sample: each counts as much."""
    given = {"teacher_model_name_or_path": str(tmp_path / "teacher"), "beta": 0.3, "lmbda": 1.0}
    given |= {"max_new_tokens": 40}
    step, model, _ = one_step("gkd", tmp_path, conversations(), data={"packing": "none"}, **given)
    losses, lengths = [], []
    for batch in step.micro_batches:
        lines = zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
        parts = [divergences(model, teacher, *learned_part(*line), beta=0.3) for line in lines]
        losses.append(torch.cat(parts).mean())
        lengths.append(sum(map(len, parts)))
    assert lengths[0] != lengths[1]
    assert_computed(step, sum(losses) / 2, model)


# --- TRL's own trainers, on the same micro-batches ---

TRLS = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, {"beta": 0.3}),
    "kto": (trl.KTOTrainer, trl.KTOConfig, {"beta": 0.3, "undesirable_weight": 0.6}),
    "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig, {"beta": 0.3}),
    "cpo": (cpo.CPOTrainer, cpo.CPOConfig, {"beta": 0.3, "cpo_alpha": 0.7}),
    "reward": (trl.RewardTrainer, trl.RewardConfig, {"center_rewards_coefficient": 0.2}),
}


@pytest.mark.parametrize("stage", TRLS)
def test_a_step_is_that_of_trls_own_trainer(stage, tmp_path):
    theirs, config, options = TRLS[stage]
    rows = pairs()
    if stage == "kto":
        rows = [
            {"prompt_ids": row["prompt_ids"], "completion_ids": row["chosen_ids"], "label": good}
            for row, good in zip(rows, [True, False] * 3, strict=True)
        ]
    step, model, reference = one_step(stage, tmp_path, rows, **options)
    text = {"prompt": "w3", "completion": "w4", "label": True, "chosen": "w4", "rejected": "w5"}
    answered = ("completion", "label") if stage == "kto" else ("chosen", "rejected")
    row = {name: text[name] for name in ("prompt", *answered)}
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    other = theirs(
        model=model.float().train(),
        args=config(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options),
        train_dataset=Dataset.from_list([row, row]),
        processing_class=tokenizer,
        **({"ref_model": reference.float()} if stage in ("dpo", "kto") else {}),
    )
    losses = [other.compute_loss(model, dict(batch)) for batch in step.micro_batches]
    assert_computed(step, sum(losses) / 2, model)
