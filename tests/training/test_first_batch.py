import json
from types import SimpleNamespace

import pytest
import torch
from threads_as_ranks import on_ranks
from tiny import write_recipe
from tiny_models import tiny_model
from tiny_trainers import losses, trainer_of
from torch import nn

from cpt.errors import RecipeError, RestartNeeded
from cpt.models import attention, fused_loss
from cpt.models.attention import BOUNDS
from cpt.models.fast_parts import HALF, HALF_WITH_EXPERTS, SINGLE, PartDifference
from cpt.optim.adamw import OneKernelAdamW
from cpt.recipe.load import load_recipe
from cpt.runs.events import read_events
from cpt.train import train
from cpt.training import first_batch as module
from cpt.training.first_batch import (
    MOST_OF_UPDATE,
    compare_first_row,
    describe_machine,
    difference_of_updates,
    fall_back,
    largest_of_processes,
    start_of_row,
    with_fallbacks,
)

FAST = {"attention": "varlen", "fused_loss": True}


@pytest.fixture
def fast_run(tiny_recipe, tmp_path):
    """A trainer of one step, as on a GPU; `written` is the part of `model:` that the user wrote."""

    def make(written=FAST, fast=FAST, **safety):
        tiny_recipe["safety"] = {"first_batch_proof": True, **safety}
        model = tiny_recipe["model"]
        trainer = trainer_of(tiny_recipe, tmp_path, steps=1, model={**model, **fast})
        trainer.run_folder.mkdir(parents=True, exist_ok=True)
        write_recipe(
            {**tiny_recipe, "model": {**model, **written}}, trainer.run_folder / "recipe.yaml"
        )
        return trainer

    return make


@pytest.fixture
def broken_loss(monkeypatch):
    kernel = fused_loss.cross_entropy_in_place

    def without_gradient(logits, *others):
        token_losses = kernel(logits, *others)
        logits.zero_()
        return token_losses

    monkeypatch.setattr(fused_loss, "cross_entropy_in_place", without_gradient)


def learned(trainer):
    return json.loads((trainer.run_folder / "learned.json").read_text())


@pytest.mark.heavy
def test_a_proof_does_not_change_the_run(fast_run):
    runs = []
    for proof in (True, False):
        trainer = fast_run(first_batch_proof=proof)
        trainer.train()
        runs.append(losses(trainer))
    assert runs[0] == runs[1]
    assert learned(trainer)["first_batch"]["model"]["attention"] == "varlen"


@pytest.mark.heavy
def test_a_fused_loss_is_proven_on_a_cpu_too(fast_run, broken_loss):
    with pytest.raises(RecipeError, match="model.fused_loss"):
        fast_run(first_batch_proof="auto").train()


@pytest.mark.heavy
def test_an_unknown_cap_is_found_before_logits_are_large(fast_run, tiny_recipe, monkeypatch):
    monkeypatch.setattr(fused_loss, "SOFT_CAPS", ())
    config = {**tiny_recipe["model"]["config"], "model_type": "gemma2", "head_dim": 8}
    config["final_logit_softcapping"] = 200.0
    fused = {"fused_loss": True, "config": config}
    with pytest.raises(RecipeError, match="model.fused_loss: .* changes its logits"):
        fast_run(written=fused, fast=fused).train()


@pytest.mark.heavy
def test_losses_are_compared_with_checkpoints_that_return_no_gradients(
    fast_run, tiny_recipe, monkeypatch
):
    tiny_recipe["training"] |= {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    }
    kernel = fused_loss.cross_entropy_in_place
    monkeypatch.setattr(
        fused_loss, "cross_entropy_in_place", lambda *arguments: kernel(*arguments) * 1.01
    )
    with pytest.raises(RecipeError, match="model.fused_loss"):
        fast_run().train()


@pytest.mark.heavy
def test_a_part_that_is_auto_falls_back_with_an_event_and_a_restart(fast_run, broken_loss):
    trainer = fast_run(written={})
    with pytest.raises(RestartNeeded, match="model.fused_loss"):
        trainer.train()
    (event,) = [event for event in read_events(trainer.run_folder) if event["kind"] == "fallback"]
    assert (event["key"], event["value"]) == ("model.fused_loss", False) and "gradient" in event[
        "reason"
    ]
    assert all(weight.grad is None for weight in trainer.model.parameters())
    recipe = load_recipe(trainer.run_folder / "recipe.yaml")
    assert with_fallbacks(recipe, trainer.run_folder).model.fused_loss is False


@pytest.mark.heavy
def test_a_part_that_the_recipe_requires_ends_the_run_with_what_to_write(fast_run, monkeypatch):
    attend = attention.attend_each
    monkeypatch.setattr(attention, "attend_each", lambda *arguments: 0 * attend(*arguments))
    with pytest.raises(RecipeError, match='model.attention: .* Write `model.attention: "sdpa"`'):
        fast_run().train()


@pytest.mark.heavy
def test_a_resumed_run_is_proven_again_only_on_another_machine(fast_run, monkeypatch, request):
    fast_run().train()
    request.getfixturevalue("broken_loss")
    trainer = fast_run()
    trainer.train()
    content = learned(trainer)
    content["first_batch"]["gpus"] = ["RTX 4090, driver 580.95"]
    (trainer.run_folder / "learned.json").write_text(json.dumps(content))
    with pytest.raises(RecipeError, match="model.fused_loss"):
        fast_run().train()


@pytest.mark.heavy
def test_a_restarted_run_trains_with_the_plain_value(tiny_recipe, tmp_path):
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    fallback = {"value": "eager", "reason": "it failed", "machine": describe_machine()}
    (folder / "learned.json").write_text(json.dumps({"fallbacks": {"model.attention": fallback}}))
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "recipe.yaml"))
    chosen = []
    train(recipe, ready=lambda trainer: chosen.append(trainer.model.config._attn_implementation))
    assert chosen == ["eager"]


@pytest.mark.parametrize(
    ("changes", "machine", "expected"),
    [
        ({}, {}, False),
        ({"torch_compile_backend": "inductor"}, {}, None),  # the user wants it compiled
        ({"torch_compile": True}, {}, True),
        ({}, {"gpus": ["RTX 4090, driver 580.95"]}, None),
    ],
)
def test_fallbacks_hold_for_their_machine_and_for_auto(
    tiny_recipe, tmp_path, changes, machine, expected
):
    fallback = {"value": False, "reason": "it failed", "machine": describe_machine() | machine}
    (tmp_path / "learned.json").write_text(
        json.dumps({"fallbacks": {"training.torch_compile": fallback}})
    )
    tiny_recipe["training"] |= changes
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "recipe.yaml"))
    assert with_fallbacks(recipe, tmp_path).training.get("torch_compile") is expected


# --- the row ---


def packed_row(*lengths):
    ids = torch.arange(sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def test_the_row_always_has_several_documents_for_the_kernel_that_separates_them():
    assert start_of_row(packed_row(100), 32, packed=True)[BOUNDS][:3].tolist() == [0, 16, 32]
    assert start_of_row(packed_row(20, 80), 32, packed=True)[BOUNDS][:3].tolist() == [0, 20, 32]


def test_a_row_of_examples_is_padded_as_their_batches_are():
    row = start_of_row(
        {"prompt_ids": [5, 6, 7], "chosen_ids": [8] * 20, "rejected_ids": []}, 16, packed=False
    )
    assert row["input_ids"].shape == (1, 16) and row["attention_mask"].sum() == 14
    assert (row["labels"] == -100).sum() == 2


def test_prompts_have_no_row():
    assert start_of_row({"prompt": "What is cpt?"}, 16, packed=False) is None


# --- the optimizer's kernel ---


class ForgetsDecay(OneKernelAdamW):
    def update(self, parameter, state, group):
        super().update(parameter, state, {**group, "weight_decay": 0.0})


def difference_of(kind, **options):
    weights = nn.Parameter(
        torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).bfloat16() / 50
    )
    optimizer = kind(
        [{"params": [weights]}], lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **options
    )
    before = weights.detach().clone()
    difference = difference_of_updates(optimizer)
    assert torch.equal(weights, before) and not optimizer.state
    return difference


OPTIONS = [
    {},
    {"rounding": "stochastic"},
    {"rounding": "kahan"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_broken_update_is_found_on_a_copy(options):
    assert difference_of(OneKernelAdamW, **options) == 0
    assert difference_of(ForgetsDecay, **options) > MOST_OF_UPDATE


@pytest.mark.heavy
def test_an_optimizer_whose_kernel_is_wrong_ends_the_run_with_another(
    tiny_recipe, tmp_path, monkeypatch
):
    tiny_recipe |= {
        "safety": {"first_batch_proof": True},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "rounding": "stochastic"},
        "model": {**tiny_recipe["model"], "dtype": "bfloat16"},
    }
    trainer = trainer_of(tiny_recipe, tmp_path, steps=1)
    trainer.create_optimizer().__class__ = ForgetsDecay
    with pytest.raises(
        RecipeError, match="optimizer.name: .* Write `optimizer.name: .*model.dtype: float32`"
    ):
        trainer.train()


@pytest.mark.parametrize(
    ("differing", "largest"),
    [
        ([(0.1, 0.2), (0.3, 0.1), (0.2, 0.1)], 1),
        ([(0.1, 0.2), (0.1, 0.1), (0.1, 0.9)], 2),
        ([(0.5, 0.0), (0.1, 0.1), (0.2, 0.1)], 0),
    ],
)
def test_the_largest_difference_of_all_processes_counts(differing, largest, monkeypatch):
    monkeypatch.setattr(module, "world_size", lambda: 3)
    monkeypatch.setattr(module, "HALF", PartDifference("", 0.01, 0.02))
    parts = [PartDifference("a part", loss, gradient) for loss, gradient in differing]
    answers = on_ranks(3, lambda rank: largest_of_processes(parts[rank]))
    assert answers == [parts[largest]] * 3
    monkeypatch.setattr(module, "world_size", lambda: 1)
    assert largest_of_processes(parts[1]) is parts[1]


def test_an_update_that_is_not_finite_differs_without_end():
    class Fails(OneKernelAdamW):
        def update(self, parameter, state, group):
            parameter.fill_(torch.nan)

    assert difference_of(Fails) == float("inf")


@pytest.mark.parametrize(
    ("how", "tolerance", "gradients"),
    [
        ({}, SINGLE, "returned"),
        ({"bf16": True}, HALF, "returned"),
        ({"fp16": True}, HALF, "returned"),
        ({"dtype": torch.bfloat16}, HALF, "returned"),
        ({"family": "qwen3_moe", "bf16": True}, HALF_WITH_EXPERTS, "returned"),
        ({"sharding": "fsdp"}, SINGLE, "accumulated"),
        ({"sharding": "zero-3"}, SINGLE, "none"),
        ({"sharding": "zero-2"}, SINGLE, "returned"),
        ({"reentrant": True}, SINGLE, "none"),
        ({"reentrant": False}, SINGLE, "returned"),
    ],
)
def test_the_first_half_micro_batch_is_compared_as_exactly_as_its_precision_allows(
    how, tolerance, gradients, monkeypatch
):
    model = tiny_model(how.get("family", "llama")).to(how.get("dtype", torch.float32))
    arguments = SimpleNamespace(
        per_device_train_batch_size=3,
        bf16=how.get("bf16", False),
        fp16=how.get("fp16", False),
        device=torch.device("cpu"),
        gradient_checkpointing="reentrant" in how,
        gradient_checkpointing_kwargs=(
            {"use_reentrant": how["reentrant"]} if "reentrant" in how else None
        ),
    )
    compared = []

    def compare(model, batch, tolerance, *, gradients, everywhere):
        compared.append((batch["input_ids"].shape, tolerance, gradients, everywhere))
        return ["a difference"]

    monkeypatch.setattr(module, "compare_fast_parts", compare)
    row = {"input_ids": torch.arange(3, 33), "position_ids": torch.arange(30)}
    options = {"longest_row": 10, "sharding": how.get("sharding", "plain")}
    differing = compare_first_row(model, arguments, first_row=lambda: row, **options)
    assert differing == ["a difference"]
    assert compared == [((1, 15), tolerance, gradients, largest_of_processes)]
    assert compare_first_row(model, arguments, first_row=None, **options) == []
    headless = model.model
    assert compare_first_row(headless, arguments, first_row=lambda: row, **options) == []
    assert len(compared) == 1


@pytest.mark.parametrize(("attention", "plain"), [("varlen", "sdpa"), ("sdpa", "eager")])
def test_a_part_that_is_required_ends_the_run_before_others_fall_back(
    attention, plain, tiny_recipe, tmp_path
):
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention))
    differing = [PartDifference("model.attention", 0.5), PartDifference("model.fused_loss", 0.5)]
    write_recipe(tiny_recipe, tmp_path / "recipe.yaml")
    with pytest.raises(RestartNeeded, match="operations for model.attention, model.fused_loss"):
        fall_back(tmp_path, differing, model)
    values = {"model.attention": plain, "model.fused_loss": False}
    fallbacks = json.loads((tmp_path / "learned.json").read_text())["fallbacks"]
    assert {key: fallback["value"] for key, fallback in fallbacks.items()} == values
    assert [(event["key"], event["value"]) for event in read_events(tmp_path)] == [*values.items()]
    (tmp_path / "events.jsonl").unlink()
    tiny_recipe["model"]["fused_loss"] = True
    write_recipe(tiny_recipe, tmp_path / "recipe.yaml")
    with pytest.raises(
        RecipeError, match=r"model.fused_loss: on this .* `model.fused_loss: false`"
    ):
        fall_back(tmp_path, differing, model)
    assert read_events(tmp_path) == []
