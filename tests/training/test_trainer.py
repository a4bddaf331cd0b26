import pytest
import torch
from causal_families import small_config
from tiny import TINY_LLAMA, tiny_config
from tiny_trainers import losses, trainer_of
from torch import _dynamo as dynamo
from torch.nn.functional import cross_entropy

from cpt.errors import RecipeError, ResourceError
from cpt.models.layers import CompiledCall, decoder_layers

pytestmark = pytest.mark.heavy

TINY_MOE = {
    **TINY_LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.5,
}
TINY_BAMBA = {
    **TINY_LLAMA,
    "model_type": "bamba",
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "attn_layer_indices": [1],
    "z_loss_coefficient": 0.5,
}


class FewerLabels(torch.utils.data.Dataset):
    """The rows, of which each has fewer labels than the one before."""

    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, number):
        row = self.rows[number]
        return row | {"labels": row["labels"].where(torch.arange(64) >= 15 * (number % 4), -100)}


@pytest.mark.parametrize(
    ("config", "micro_batch", "averages"),
    [
        (TINY_LLAMA, 1, True),
        (TINY_MOE, 1, True),
        (TINY_MOE, 1, False),
        (TINY_MOE, 4, True),
        (TINY_BAMBA, 1, True),
        (TINY_BAMBA, 4, True),
    ],
    ids=["dense", "experts", "by process", "experts at once", "z-loss", "z-loss at once"],
)
def test_a_step_is_the_mean_over_its_labels_however_they_are_spread(
    tiny_recipe, tmp_path, config, micro_batch, averages
):
    """Of penalties, which have no labels, it is the mean over the micro-batches."""
    tiny_recipe["model"]["config"] = config
    tiny_recipe["training"]["per_device_train_batch_size"] = micro_batch
    tiny_recipe["training"]["average_tokens_across_devices"] = averages
    trainer = trainer_of(tiny_recipe, tmp_path, steps=1)
    trainer.rows = FewerLabels(trainer.rows)
    rows = [trainer.rows[number] for number in range(4)]
    routed = {"output_router_logits": True} if config is TINY_MOE else {}
    summed, num_labels, penalties = 0.0, 0, []
    for first in range(0, 4, micro_batch):
        batch = {
            key: torch.stack([row[key] for row in rows[first : first + micro_batch]])
            for key in rows[0]
        }
        targets = batch.pop("labels")[:, 1:].flatten()
        with torch.no_grad():
            outputs = trainer.model(**batch, **routed)
        summed += cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), targets, reduction="sum"
        ).item()
        num_labels += int((targets != -100).sum())
        z_loss = outputs.logits.logsumexp(-1).square().mean()
        penalty = outputs.aux_loss if routed else z_loss * (config is TINY_BAMBA)
        penalties.append(0.5 * penalty.item())
    trainer.train()
    assert losses(trainer)[1] == pytest.approx(
        summed / num_labels + sum(penalties) / len(penalties), rel=1e-5
    )


@pytest.fixture
def held_out(corpus):
    return {"perplexity": [{"path": str(corpus / "held_out.jsonl")}]}


# --- label smoothing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        TINY_LLAMA,
        tiny_config("cpt-gpt2", vocab_size=384, unpadded_vocab_size=320),
        pytest.param(TINY_BAMBA, marks=pytest.mark.slow),
    ],
    ids=["llama", "padded vocabulary", "z-loss"],
)
def test_labels_are_smoothed_over_the_words_and_only_in_training(
    tiny_recipe, tmp_path, held_out, config
):
    tiny_recipe["model"]["config"] = {**config, "initializer_range": 0.3}
    tiny_recipe["training"]["per_device_train_batch_size"] = 1
    evaluated, trained = [], []
    for smoothing in (0.0, 0.2):
        training = {**tiny_recipe["training"], "label_smoothing_factor": smoothing}
        changes = {"training": training, "evaluation": held_out}
        trainer = trainer_of(tiny_recipe, tmp_path, steps=1, **changes)
        evaluated.append(trainer.evaluate())
        rows = [trainer.rows[number] for number in range(4)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        labels = batch.pop("labels")[:, 1:].flatten()
        with torch.no_grad():
            logits = trainer.model(**batch).logits[:, :-1, :320].flatten(0, 1)
        trainer.train()
        expected = cross_entropy(logits, labels, label_smoothing=smoothing).item()
        trained.append(losses(trainer)[1] - expected)
    assert trained[1] == pytest.approx(trained[0], abs=1e-5)
    assert evaluated[1] == evaluated[0]


def test_labels_of_a_stage_with_another_loss_are_not_smoothed(tiny_recipe, tmp_path):
    tiny_recipe |= {"stage": "dpo"}
    tiny_recipe["training"] |= {"label_smoothing_factor": 0.1}
    with pytest.raises(RecipeError, match="training.label_smoothing_factor"):
        trainer_of(tiny_recipe, tmp_path)


def test_a_family_that_does_not_shift_labels_is_refused(tiny_recipe, tmp_path):
    tiny_recipe["model"]["config"] = small_config("bart", vocab_size=320).to_diff_dict()
    with pytest.raises(RecipeError, match="BartForCausalLM does not shift labels"):
        trainer_of(tiny_recipe, tmp_path)


# --- evaluation ---


def test_held_out_metrics_do_not_depend_on_the_packing(tiny_recipe, tmp_path, held_out):
    tiny_recipe["training"]["per_device_train_batch_size"] = 1
    figures = []
    for packing in ("best_fit", "token_budget"):
        data = {**tiny_recipe["data"], "sequence_length": 256, "packing": packing}
        figures.append(trainer_of(tiny_recipe, tmp_path, data=data, evaluation=held_out).evaluate())
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)


def test_out_of_memory_in_an_evaluation_names_the_evaluations_batch_size(
    tiny_recipe, tmp_path, held_out, monkeypatch
):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    trainer = trainer_of(tiny_recipe, tmp_path, evaluation=held_out)
    monkeypatch.setattr("cpt.training.trainer.measure_and_keep", full)
    with pytest.raises(
        ResourceError, match=r"evaluation of step 0.*`training.per_device_eval_batch_size`"
    ):
        trainer.train()


# --- compiled layers ---


@pytest.fixture
def fresh_compiler():
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield
    dynamo.reset()


def test_layers_are_compiled_and_nothing_around_them(fresh_compiler, tiny_recipe, tmp_path):
    tiny_recipe["training"]["torch_compile"] = True
    trainer = trainer_of(tiny_recipe, tmp_path)
    compiled = [
        module
        for module in trainer.model.modules()
        if isinstance(module._compiled_call_impl, CompiledCall)
    ]
    assert (
        compiled == decoder_layers(trainer.model)
        and trainer.accelerator.state.dynamo_plugin.backend == "NO"
    )
