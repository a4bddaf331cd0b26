"""What every trainer of TRL's is given: our rows, our guards, our evaluation, a reference; and what it is refused."""

import pytest
import torch
from example_runs import build_run
from tiny import tiny_config
from tiny_rewards import bandit, quiet_trainer
from tiny_trainers import events
from torch.nn.functional import log_softmax
from transformers.trainer_callback import PrinterCallback
from trl.trainer.utils import add_fused_lm_head

from cpt.errors import Interrupted, RecipeError
from cpt.models.build import build_model
from cpt.recipe.schema import Model
from cpt.stages.examples import fit_fused_head
from cpt.stages.models import model_for

# --- a step ---


def faulty_trainer(stage, folder, fault=None):
    """Six steps, the loss of which a fault may change."""
    if stage == "grpo":
        trainer = quiet_trainer(bandit("grpo", folder, steps=6))
    else:
        trainer = build_run(stage, folder, steps=6)
        trainer.remove_callback(PrinterCallback)
    if fault is not None:
        plain = trainer.compute_loss
        trainer.compute_loss = lambda model, inputs, *rest, **named: fault(
            trainer, inputs, plain(model, inputs, *rest, **named)
        )
    return trainer


@pytest.mark.heavy
@pytest.mark.parametrize("stage", ["dpo", "grpo", pytest.param("reward", marks=pytest.mark.slow)])
def test_a_loss_that_is_nan_costs_its_step_alone(stage, tmp_path):
    def fault(trainer, inputs, loss):
        return loss * float("nan") if trainer.state.global_step + 1 == 3 else loss

    trainer = faulty_trainer(stage, tmp_path, fault)
    trainer.train()
    assert events(trainer) == [("nan_skipped", 3)] and trainer.state.global_step == 6
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


@pytest.mark.heavy
def test_with_an_adapter_the_reference_is_the_model_without_it(tmp_path):
    trainer = build_run("dpo", tmp_path, steps=2, lora={"r": 4})
    assert trainer.ref_model is None and [*trainer.model.peft_config] == ["default"]
    trainer.train()
    margins = [
        line["rewards/margins"] for line in trainer.state.log_history if "rewards/margins" in line
    ]
    assert margins[0] == pytest.approx(0, abs=1e-6) and margins[-1] > 0


def test_adapters_over_quantized_weights_stay_as_they_were(tmp_path, monkeypatch):
    """TRL rounds them to bfloat16."""

    def quantized(*arguments):
        model = model_for(*arguments)
        model.get_base_model().is_loaded_in_4bit = True
        built.append(
            {name: one.clone() for name, one in model.named_parameters() if one.requires_grad}
        )
        return model

    built = []
    monkeypatch.setattr("example_runs.model_for", quantized)
    trainer = build_run("dpo", tmp_path, lora={"r": 4})
    found = {name: one for name, one in trainer.model.named_parameters() if one.requires_grad}
    assert found.keys() == built[0].keys()
    assert all(
        one.dtype == torch.float32 and one.equal(built[0][name]) for name, one in found.items()
    )


# --- rows ---


def test_dialogues_are_cut_at_the_length_of_a_row(tmp_path):
    long = {"prompt_ids": [9] * 60, "chosen_ids": [5] * 10, "rejected_ids": [6] * 2}
    batch = build_run("reward", tmp_path).collate_examples()([long])
    assert batch["input_ids"].tolist() == [[9] * 60 + [5] * 4, [9] * 60 + [6] * 2 + [2] * 2]
    assert batch["attention_mask"].sum(1).tolist() == [64, 62]
    batch = build_run("orpo", tmp_path).collate_examples()([long])
    assert batch["prompt_input_ids"].tolist() == [[9] * 60]
    for side, answer in (("chosen", [5] * 4), ("rejected", [6] * 2)):
        assert batch[f"{side}_input_ids"].tolist() == [[9] * 60 + answer]
        assert batch[f"{side}_labels"].tolist() == [[-100] * 60 + answer]
        assert batch[f"{side}_attention_mask"].tolist() == [[1] * (60 + len(answer))]


# --- evaluation ---


def evaluated(stage, folder, *, count, batch):
    return build_run(
        stage, folder, held_out=count, training={"per_device_eval_batch_size": batch}
    ).evaluate()


@pytest.mark.heavy
def test_metrics_of_a_set_do_not_depend_on_the_batch_size(tmp_path):
    small, large = (evaluated("dpo", tmp_path, count=7, batch=size) for size in (2, 7))
    for name in ("eval_pairs_loss", "eval_pairs_logps/chosen", "eval_pairs_rewards/margins"):
        assert small[name] == pytest.approx(large[name], abs=1e-5)
    assert small["eval_pairs_examples"] == 7 and "eval_pairs_num_tokens" not in small


def test_an_evaluation_without_a_reference_leaves_the_metrics_of_training(tmp_path):
    trainer = build_run("orpo", tmp_path, held_out=5, training={"per_device_eval_batch_size": 3})
    for name in ("rewards/margins", "nll_loss", "of training"):
        trainer.trl_metrics["train"][name] = [7.0, 8.0]
    trainer.log = lambda logs: logged.append(logs)
    logged, before = [], {**trainer.trl_metrics["train"]}
    found = trainer.evaluate()
    assert {**trainer.trl_metrics["train"]} == before
    assert logged == [found] and found["eval_pairs_examples"] == 5
    names = {name.removeprefix("eval_pairs_") for name in found}
    assert {"loss", "loss/nll", "rewards/margins", "logps/chosen"} <= names
    assert "nll_loss" not in names and "of training" not in names
    for name in ("rewards/margins", "nll_loss", "of training"):
        assert trainer.trl_metrics["train"][name] == [7.0, 8.0]
    expected = [
        trainer.compute_loss(
            trainer.model.eval(), trainer.collate_examples()(trainer.rows.rows[a:b])
        )
        for a, b in ((0, 3), (3, 5))
    ]
    mean = (3 * expected[0].item() + 2 * expected[1].item()) / 5
    assert found["eval_pairs_loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.heavy
def test_a_metric_is_the_mean_of_the_batches_that_have_it(tmp_path):
    """Of two answers one is wanted and one is not: each batch of one has the likelihood of one kind alone."""
    apart, whole = (evaluated("kto", tmp_path, count=2, batch=size) for size in (1, 2))
    for name in ("eval_pairs_logps/chosen", "eval_pairs_logps/rejected"):
        assert apart[name] == pytest.approx(whole[name], rel=1e-4)


def test_processes_share_whole_batches_and_repeat_the_rest(tmp_path, monkeypatch):
    trainer = build_run("dpo", tmp_path, held_out=7)
    assert [*trainer.batches_of(7)] == [([0, 1, 2, 3], 4), ([4, 5, 6], 3)]
    seen = []
    for rank in (0, 1):
        monkeypatch.setattr(type(trainer.args), "world_size", 2)
        monkeypatch.setattr(type(trainer.args), "process_index", rank)
        seen.append([*trainer.batches_of(11)])
    assert seen == [[([0, 1, 2, 3], 8), ([8, 9, 10], 3)], [([4, 5, 6, 7], 8), ([8, 9, 10], 3)]]


def test_a_signal_in_an_evaluation_stops_and_saves(tmp_path):
    def stop():
        raise Interrupted("a signal")

    trainer = build_run("dpo", tmp_path, held_out=4)
    trainer.call_prediction_step = stop
    assert (
        trainer.evaluate() == {}
        and trainer.control.should_save
        and trainer.control.should_training_stop
    )
    assert trainer.model.training


# --- what is refused, and silence ---


def test_no_telemetry_is_sent(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(
        "trl.trainer.base_trainer.send_telemetry", lambda **about: sent.append(about)
    )
    build_run("dpo", tmp_path)
    assert sent == []


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"training": {"use_liger_kernel": True}}, "training.use_liger_kernel"),
        ({"training": {"activation_offloading": True}}, "training.activation_offloading"),
        ({"training": {"loss_type": ["sigmoidd"]}}, "training.loss_type"),
        ({"lora": {"r": 4, "target_modules": ["lm_head"]}}, "lm_head"),  # it would not be trained
        (
            {"lora": {"r": 4, "init_lora_weights": "pissa"}},
            "model.lora.init_lora_weights",
        ),  # it changes the base
    ],
)
def test_what_trls_trainers_cannot_do_is_refused_by_its_key(options, named, tmp_path):
    with pytest.raises(RecipeError, match=named):
        build_run("dpo", tmp_path, **options).train()


# --- TRL's fused head, over our own families ---


class Known:
    """A tokenizer of fewer tokens than the padded head has rows."""

    eos_token_id = bos_token_id = pad_token_id = 2

    def get_vocab(self):
        return {f"token {number}": number for number in range(96)}


def fitted(model_type):
    model = build_model(Model(from_scratch=True, config=tiny_config(model_type)), Known())
    add_fused_lm_head(model)
    fit_fused_head(model)
    return model.train()


IDS = torch.randint(3, 90, (3, 12), generator=torch.Generator().manual_seed(0))


def test_rows_of_the_head_that_are_no_tokens_have_no_probability_and_get_no_gradient():
    model = fitted("cpt-gpt2")
    found = model(input_ids=IDS, labels=IDS, fused_lm_head=True).log_probs
    wanted = log_softmax(model(input_ids=IDS).logits[:, :-1], -1).gather(-1, IDS[:, 1:, None])[
        ..., 0
    ]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    known, gradient = model.config.unpadded_vocab_size, model.lm_head.weight.grad
    assert gradient[:known].abs().sum() > 0 and not gradient[known:].any()


def test_a_stage_fits_the_head_of_the_model_and_of_its_reference(tmp_path):
    config = tiny_config("cpt-gpt2", unpadded_vocab_size=96)
    trainer = build_run("dpo", tmp_path, config=config)
    for model in (trainer.model.eval(), trainer.ref_model):
        found = model(input_ids=IDS, labels=IDS, fused_lm_head=True).log_probs
        logits = model(input_ids=IDS).logits[:, :-1]
        expected = log_softmax(logits, -1).gather(-1, IDS[:, 1:, None])[..., 0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", ["minimind2_moe", "minimind3_moe"])
def test_experts_are_balanced_as_the_family_does_whatever_the_padding(model_type):
    model = fitted(model_type)
    wanted = model(input_ids=IDS, output_router_logits=True).aux_loss.item()
    padded = torch.cat((IDS, torch.full((3, 20), 2)), dim=1)
    mask = torch.cat((torch.ones_like(IDS), torch.zeros(3, 20, dtype=torch.long)), dim=1)
    for ids, options in ((IDS, {}), (padded, {"attention_mask": mask})):
        found = model(
            input_ids=ids, labels=ids, fused_lm_head=True, output_router_logits=True, **options
        )
        assert found.aux_loss.item() == pytest.approx(wanted, rel=1e-5)
    assert (
        model(input_ids=IDS, labels=IDS, fused_lm_head=True, output_router_logits=False).aux_loss
        is None
    )
