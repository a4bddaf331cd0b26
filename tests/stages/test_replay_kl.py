"""`replay_kl` of a source: its rows stay close to the base."""

import pytest
import torch
from tiny import write_recipe
from tiny_checkpoints import save_llama
from tiny_teachers import student_trainer
from tiny_trainers import losses, metrics, same, weights
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.stages.replay_kl import ReplayTrainer

pytestmark = pytest.mark.heavy
WEIGHT = 0.3


@pytest.fixture
def trainer_of(tiny_recipe, tokenizer_folder, tmp_path):
    """`trainer_of(replay_kl, steps=4, **sections)`: steps of two micro-batches of two rows, from a base; the second
    source is replayed."""
    base = save_llama(tmp_path / "base", tokenizer_folder, 1)

    def build(replay_kl=WEIGHT, *, name="tiny", steps=4, model=None, **sections):
        domain, general = tiny_recipe["data"]["sources"]
        data = {
            "sequence_length": 64,
            "sources": [domain, {**general, "replay_kl": replay_kl}],
            **sections.pop("data", {}),
        }
        sections = {"data": data, "budget": {"tokens": steps * 256, "global_batch_tokens": 256}, **sections}
        recipe = {
            **tiny_recipe,
            "stage": "cpt",
            "name": name,
            "model": {"path": str(base), **(model or {})},
            **sections,
        }
        return student_trainer(load_recipe(write_recipe(recipe, tmp_path / "recipe.yaml")))

    build.base = base
    return build


def by_hand(model, base, rows, weight):
    """Loss of a step of these rows: document by document, in float64 probabilities."""
    entropy, divergence, labels = 0.0, 0.0, 0
    for row in rows:
        starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), len(row["position_ids"])]
        for first, last in zip(starts, starts[1:], strict=False):
            ids, targets = row["input_ids"][None, first:last], row["labels"][first + 1 : last]
            learned = targets != -100
            own, other = (one(input_ids=ids).logits[0, :-1][learned].double() for one in (model, base))
            entropy = entropy + cross_entropy(own, targets[learned], reduction="sum")
            labels += int(learned.sum())
            if row["source"] == 1:
                p = other.softmax(-1).detach()
                divergence = divergence + (p * (p.log() - own.log_softmax(-1))).sum()
    return (entropy + weight * divergence) / labels, divergence


def test_a_step_has_the_loss_and_the_gradient_of_the_formula(trainer_of):
    trainer, found = trainer_of(steps=1), {}
    assert isinstance(trainer, ReplayTrainer) and trainer.args.gradient_accumulation_steps == 2
    with torch.no_grad():
        for number, weight in enumerate(trainer.model.parameters()):
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    start = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    measure = trainer.guard.norm_of_step

    def norm_of_step():
        found.update({name: weight.grad.clone() for name, weight in trainer.model.named_parameters()})
        return measure()

    trainer.guard.norm_of_step = norm_of_step
    rows = [trainer.rows[number] for number in range(4)]
    assert {int(row["source"]) for row in rows} == {0, 1} and any((row["position_ids"] == 0).sum() > 1 for row in rows)
    trainer.train()
    model, base = (AutoModelForCausalLM.from_pretrained(trainer_of.base) for _ in range(2))
    model.load_state_dict(start, strict=False)
    loss, divergence = by_hand(model, base, rows, WEIGHT)
    loss.backward()
    assert losses(trainer)[1] == pytest.approx(loss.item(), rel=1e-5) and divergence > 0.1
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-3, atol=1e-6)
    (logged,) = [line["replay_kl"] for line in metrics(trainer) if "replay_kl" in line]
    tokens = sum(int((row["labels"][1:] != -100).sum()) for row in rows if row["source"] == 1)
    assert logged == pytest.approx(divergence.item() / tokens, rel=1e-4)


@pytest.mark.parametrize("nothing", [None, 0.0])
def test_without_a_weight_nothing_changes(trainer_of, tiny_recipe, nothing):
    plain, other = trainer_of(None, name="plain"), trainer_of(nothing, name="other")
    for trainer in (plain, other):
        trainer.train()
    assert not isinstance(other, ReplayTrainer) and losses(plain) == losses(other)
    assert same(weights(plain), weights(other))
