"""`replay_kl` of a source: its rows stay close to the base."""

import pytest
import torch
from tiny import write_recipe
from tiny_checkpoints import save_llama
from tiny_teachers import student_trainer
from tiny_trainers import losses, metrics, same, weights
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from cpt.contrib.distillation.replay_kl import ReplayTrainer
from cpt.data.rows.packing import stack_rows
from cpt.errors import RecipeError
from cpt.recipe.load import load_recipe

pytestmark = pytest.mark.heavy
WEIGHT = 0.3
NAMES = ("input_ids", "labels", "position_ids")


@pytest.fixture
def trainer_of(tiny_recipe, tokenizer_folder, tmp_path):
    """Steps of four rows, from a base in `tmp_path`; the second source is replayed."""

    def build(
        replay_kl=WEIGHT,
        *,
        of_domain=None,
        steps=4,
        packing="best_fit",
        micro_batch=2,
        lora=None,
        **sections,
    ):
        base = tmp_path / "base"
        if not base.exists():
            save_llama(
                base, tokenizer_folder, 1, attention_dropout=0.5 if lora is not None else 0.0
            )
        domain, general = tiny_recipe["data"]["sources"]
        sources = [{**domain, "replay_kl": of_domain}, {**general, "replay_kl": replay_kl}]
        data = {"sequence_length": 64, "packing": packing, "sources": sources}
        sections = {
            "budget": {"tokens": steps * 256, "global_batch_tokens": 256},
            "data": data,
            **sections,
        }
        training = {"per_device_train_batch_size": micro_batch, "logging_steps": 1}
        model = {"model": {"path": str(base), "lora": lora}, "stage": "cpt", "training": training}
        return student_trainer(
            load_recipe(write_recipe({**tiny_recipe, **model, **sections}, tmp_path / "r.yaml"))
        )

    return build


def documents(row):
    """(ids, labels) of each document of a row, or of each line of a batch of padded documents."""
    for ids, labels, positions in zip(
        *(row[name].view(-1, row[name].shape[-1]) for name in NAMES), strict=True
    ):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        yield from ((ids[a:b], labels[a:b]) for a, b in zip(starts, starts[1:], strict=False))


def by_hand(model, base, rows, weights):
    """Loss of a step of these rows, one document after the other, in float64, and the mean KL of their sources."""
    loss, divergence, labels, replayed = 0.0, 0.0, 0, 0
    for row in rows:
        for ids, targets in documents(row):
            learned = targets[1:] != -100
            own, other = (
                one(input_ids=ids[None]).logits[0, :-1][learned].double() for one in (model, base)
            )
            loss = loss + cross_entropy(own, targets[1:][learned], reduction="sum")
            labels += int(learned.sum())
            if weight := weights[int(row["source"])]:
                p = other.softmax(-1).detach()
                kl = (p * (p.log() - own.log_softmax(-1))).sum()
                loss, divergence = loss + weight * kl, divergence + kl.item()
                replayed += int(learned.sum())
    return loss / labels, divergence / replayed


@pytest.mark.parametrize(
    ("of_domain", "packing", "micro_batch"),
    [(None, "best_fit", 2), (1.5, "best_fit", 2), (None, "token_budget", 1)],
)
def test_a_step_has_the_loss_and_the_gradient_of_the_formula(
    trainer_of, tmp_path, of_domain, packing, micro_batch
):
    trainer, found = (
        trainer_of(steps=1, of_domain=of_domain, packing=packing, micro_batch=micro_batch),
        {},
    )
    assert (
        isinstance(trainer, ReplayTrainer)
        and trainer.args.gradient_accumulation_steps == 4 // micro_batch
    )
    with torch.no_grad():
        for number, weight in enumerate(trainer.model.parameters()):
            weight += 0.02 * torch.randn(
                weight.shape, generator=torch.Generator().manual_seed(number)
            )
    model, base = (AutoModelForCausalLM.from_pretrained(tmp_path / "base") for _ in range(2))
    model.load_state_dict(trainer.model.state_dict())
    measure = trainer.checked_step.norm_of_step

    def norm_of_step():
        found.update(
            {name: weight.grad.clone() for name, weight in trainer.model.named_parameters()}
        )
        return measure()

    trainer.checked_step.norm_of_step = norm_of_step
    rows = [trainer.rows[number] for number in range(4)]
    assert {int(row["source"]) for row in rows} == {0, 1} and any(
        len([*documents(row)]) > 1 for row in rows
    )
    trainer.train()
    loss, mean = by_hand(model, base, rows, [of_domain, WEIGHT])
    loss.backward()
    assert losses(trainer)[1] == pytest.approx(loss.item(), rel=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-3, atol=1e-6)
    assert metrics(trainer)[0]["replay_kl"] == pytest.approx(mean, rel=1e-4) and mean > 0.01


@pytest.mark.parametrize("source", [0, 1])
def test_a_batch_alone_is_the_mean_over_its_own_labels(trainer_of, tmp_path, source, monkeypatch):
    """Rows of a source without `replay_kl` have their cross entropy only."""
    trainer = trainer_of(of_domain=None)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    rows = [row for row in map(trainer.rows.__getitem__, range(20)) if row["source"] == source][:3]
    loss, outputs = trainer.compute_loss(trainer.model.eval(), stack_rows(rows), True)
    weights = [0.0, WEIGHT] if source else [1e-9, 0.0]
    expected, _ = by_hand(trainer.model, base, rows, weights)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert outputs["logits"].shape == (3, 64, 320)
    assert trainer.compute_loss(trainer.model, stack_rows(rows)).equal(loss)
    labels = sum(int((row["labels"][1:] != -100).sum()) for row in rows)
    _, mean = by_hand(trainer.model, base, rows, weights)
    for averages, processes in ((True, 3), (False, 1)):
        # gradients are averaged over three processes, whose labels are counted together
        trainer.args.average_tokens_across_devices = averages
        given = {"num_items_in_batch": torch.tensor(2 * labels)}
        alone = trainer.compute_loss(trainer.model, stack_rows(rows), **given)
        with monkeypatch.context() as patch:
            patch.setattr(type(trainer.args), "world_size", 3)
            shared = trainer.compute_loss(trainer.model, stack_rows(rows), **given)
        divergence = weights[1] * mean / 2
        assert (shared - alone).item() == pytest.approx((processes - 1) * divergence, abs=1e-6)


def test_logits_are_in_fp32_where_all_weights_are_in_half_precision(trainer_of, tmp_path):
    """The divergence reads them: autocast stays on, unlike in a run that trains on the model's own loss."""
    trainer_of()
    training = {"per_device_train_batch_size": 2, "logging_steps": 1, "bf16": True}
    model = {"path": str(tmp_path / "base"), "dtype": "bfloat16"}
    trainer = trainer_of(model=model, training=training)
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.bfloat16}
    assert trainer.accelerator.native_amp


@pytest.mark.parametrize(
    "lora", [{"r": 4}, "cpt"]
)  # `cpt` also trains a copy of the embeddings and the head
def test_the_base_of_adapters_is_the_model_without_them_and_without_dropout(
    trainer_of, tmp_path, lora
):
    trainer = trainer_of(lora=lora)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight += 0.1 if weight.requires_grad else 0.0
    trained = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    batch = stack_rows([trainer.rows[number] for number in range(4)])
    chosen = batch.pop("source") == 1
    found = trainer.predict_by_base(trainer.model.train(), batch, chosen)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()(
        input_ids=batch["input_ids"][chosen], position_ids=batch["position_ids"][chosen]
    )
    torch.testing.assert_close(found, expected.logits)
    assert trainer.base is None and trainer.model.training
    assert {
        name for name, weight in trainer.model.named_parameters() if weight.requires_grad
    } == trained


def test_a_weight_of_0_changes_nothing(trainer_of):
    plain, other = trainer_of(None, name="plain"), trainer_of(0.0, name="other")
    for trainer in (plain, other):
        trainer.train()
    assert not isinstance(other, ReplayTrainer) and losses(plain) == losses(other)
    assert same(weights(plain), weights(other))


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_a_resumed_run_stays_near_the_start_of_the_run(trainer_of, lora):
    whole = trainer_of(
        3.0, lora=lora, checkpoints={"every_steps": 2}, optimizer={"learning_rate": 1e-2}
    )
    whole.train()
    expected = [line["replay_kl"] for line in metrics(whole) if "replay_kl" in line]
    again = trainer_of(
        3.0, lora=lora, checkpoints={"every_steps": 2}, optimizer={"learning_rate": 1e-2}
    )
    again.train(resume_from_checkpoint=whole.run_folder / "checkpoint-2")
    assert same(weights(whole), weights(again)) and losses(whole) == losses(again)
    assert [
        line["replay_kl"] for line in metrics(again) if "replay_kl" in line
    ] == expected and expected[-1] > 0


def test_a_fused_loss_which_hides_the_logits_is_refused(trainer_of, tmp_path):
    with pytest.raises(RecipeError, match="model.fused_loss"):
        trainer_of(model={"path": str(tmp_path / "base"), "fused_loss": True})
