"""Gradients in half precision, autocast, FSDP2 and shared rows."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from one_process_group import alone_in_a_group
from tiny import TINY, TINY_LLAMA
from tiny_trainers import metrics, trainer_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.training_args import ParallelMode

from cpt.errors import RecipeError
from cpt.models.attention import PartOfRows
from cpt.optim.gradients import gradient_norm
from cpt.training import engine as engine_file
from cpt.training.averaging import AverageInBackward
from cpt.training.engine import Engine, SharedRows
from cpt.training.trainer import CPTTrainer


def halves(sections, folder, *, rows=1, steps=2, **changes):
    """A trainer of bfloat16 weights that takes so many rows at once."""
    model = {**sections["model"], "dtype": "bfloat16"}
    training = {**sections["training"], "bf16": True, "per_device_train_batch_size": rows}
    return trainer_of(
        sections, folder, steps=steps, **{"model": model, "training": training, **changes}
    )


@pytest.mark.heavy
def test_bfloat16_gradients_are_clipped_by_their_norm_in_fp32(tiny_recipe, tmp_path):
    model = {**tiny_recipe["model"], "dtype": "bfloat16"}
    training = {**tiny_recipe["training"], "max_grad_norm": 0.25}
    # sgd has no kernel that clips
    optimizer = {"name": "sgd", "learning_rate": 1e-3}
    trainer = trainer_of(tiny_recipe, tmp_path, model=model, training=training, optimizer=optimizer)
    seen, step = [], trainer.create_optimizer().step

    def look(*arguments, **options):
        seen.append(gradient_norm([p.grad for p in trainer.model.parameters()]).item())
        return step(*arguments, **options)

    trainer.optimizer.step = look
    trainer.train()
    logged = [line["grad_norm"] for line in metrics(trainer) if "grad_norm" in line]
    assert seen and max(seen) <= 0.25 * 1.01 < min(logged)
    assert any(torch.tensor(norm).bfloat16().item() != norm for norm in logged), (
        "more digits than a bfloat16 has"
    )


class Gradients(TrainerCallback):
    """The types of all gradients before each update, and how far those of the first step are from a sum in fp64."""

    def __init__(self):
        self.dtypes, self.sums, self.error = [], {}, 0.0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for weight in model.parameters():
            weight.register_hook(lambda gradient, weight=weight: self.add(weight, gradient))

    def add(self, weight, gradient):
        self.sums[weight] = self.sums.get(weight, 0) + gradient.double()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.dtypes.append({weight.grad.dtype for weight in model.parameters()})
        if len(self.dtypes) == 1:
            errors = [
                (weight.grad.double() - exact).norm() / exact.norm()
                for weight, exact in self.sums.items()
            ]
            self.error = max(errors).item()


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["adamw", pytest.param("adamw_8bit", marks=pytest.mark.quantized)])
def test_gradients_of_many_micro_batches_accumulate_in_fp32(tiny_recipe, tmp_path, name):
    seen, budget = Gradients(), {"tokens": 16 * 64, "global_batch_tokens": 16 * 64}
    optimizer = {"name": name, "learning_rate": 1e-3}
    halves(tiny_recipe, tmp_path, callbacks=[seen], budget=budget, optimizer=optimizer).train()
    assert seen.dtypes == [{torch.float32}] and 0 < seen.error < 1e-6


@pytest.mark.heavy
def test_a_step_of_one_micro_batch_keeps_gradients_in_half_precision(tiny_recipe, tmp_path):
    seen = Gradients()
    halves(tiny_recipe, tmp_path, rows=4, callbacks=[seen]).train()
    assert seen.dtypes == [{torch.bfloat16}] * 2


# --- autocast ---


def seen_in_forward(trainer):
    """Of all modules of the model in a run: types of what they return, and whether they compute in autocast."""
    types, modes = set(), set()

    def look(module, inputs, output):
        modes.add(torch.is_autocast_enabled("cpu"))
        types.update({output.dtype} if torch.is_tensor(output) else ())

    for module in list(trainer.model.modules())[1:]:
        module.register_forward_hook(look)
    trainer.train()
    return types, modes


@pytest.mark.heavy
def test_bfloat16_weights_compute_without_autocast(tiny_recipe, tmp_path):
    assert seen_in_forward(halves(tiny_recipe, tmp_path, rows=4)) == ({torch.bfloat16}, {False})


@pytest.mark.heavy
@pytest.mark.parametrize(
    "model", [{"dtype": "float32"}, {"lora": {"r": 4}}], ids=["fp32", "adapters"]
)
def test_fp32_weights_and_adapters_compute_in_autocast(tiny_recipe, tmp_path, model):
    base = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**TINY_LLAMA), dtype=torch.bfloat16
    )
    base.save_pretrained(tmp_path / "base")
    model = {"path": str(tmp_path / "base"), "dtype": "bfloat16", **model}
    _, modes = seen_in_forward(
        halves(tiny_recipe, tmp_path, rows=4, steps=1, model=model, stage="cpt")
    )
    assert True in modes


# --- FSDP2 ---


def test_a_forward_pass_alone_leaves_nothing_gathered_behind():
    with alone_in_a_group():
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        fully_shard(layers, reshard_after_forward=False)
        with torch.no_grad():
            layers(torch.ones(1, 4))
        assert not any(isinstance(parameter, DTensor) for parameter in layers.parameters())
        Engine(SimpleNamespace(is_fsdp_enabled=True, model=layers)).reshard()
        assert all(isinstance(parameter, DTensor) for parameter in layers.parameters())


class Dividing(nn.Linear):
    """A model that divides its loss by the step's labels, as those of transformers do."""

    def forward(self, inputs, num_items_in_batch):
        return super().forward(inputs).float().sum() / num_items_in_batch, num_items_in_batch


def test_half_precision_does_not_round_the_number_of_labels(monkeypatch):
    monkeypatch.setattr(Trainer, "_get_num_items_in_batch", lambda *_: torch.tensor(449.0))
    counting = CPTTrainer.__new__(CPTTrainer)
    counting.args = SimpleNamespace(
        n_gpu=0,
        world_size=1,
        average_tokens_across_devices=True,
        parallel_mode=ParallelMode.NOT_DISTRIBUTED,
        device=torch.device("cpu"),
    )
    counting.shared_rows = SimpleNamespace(parts=1)
    counting.checked_step = SimpleNamespace(begin=lambda: None)
    counting.gradients = SimpleNamespace(begin_step=lambda: None)
    counting.state = SimpleNamespace(global_step=0)
    counting.engine = SimpleNamespace(begin_step=lambda: None)
    _, labels = counting.get_batch_samples(iter([]), 0, torch.device("cpu"))
    with alone_in_a_group():
        model = Dividing(2, 1)
        fully_shard(
            model,
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        )
        assert model(torch.ones(1, 2), torch.tensor(449.0))[1] == 448, "FSDP casts floats"
        assert model(torch.ones(1, 2), labels)[1] == 449


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("no", None)]
)
@pytest.mark.parametrize("is_enabled", [True, False])
def test_fsdp2_is_set_up_on_a_cpu_too_and_reduces_in_fp32(
    precision, dtype, is_enabled, monkeypatch
):
    PartialState()
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType.MULTI_CPU)
    of_accelerate = SimpleNamespace(mixed_precision_policy="accelerate's")
    state = SimpleNamespace(fsdp_plugin=of_accelerate, distributed_type=DistributedType.MULTI_CPU)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(state=state, mixed_precision=precision),
        args=SimpleNamespace(fsdp_plugin_args={"fsdp_version": 2, "reshard_after_forward": False}),
        is_fsdp_enabled=is_enabled,
    )
    Engine(trainer).set_up_fsdp()
    plugin = state.fsdp_plugin
    assert trainer.is_fsdp_enabled is True
    if is_enabled:
        assert plugin is of_accelerate and state.distributed_type == DistributedType.MULTI_CPU
    else:
        assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, False)
        assert state.distributed_type == PartialState().distributed_type == DistributedType.FSDP
    if dtype is None:
        assert plugin.mixed_precision_policy in ("accelerate's", None)
    else:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        assert plugin.mixed_precision_policy == policy


def test_without_fsdp_nothing_is_set_up():
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(mixed_precision="bf16"),
        args=SimpleNamespace(fsdp_plugin_args=None),
        is_fsdp_enabled=False,
    )
    Engine(trainer).set_up_fsdp()
    assert not trainer.is_fsdp_enabled


def test_sharding_keeps_the_weights_that_preparing_loses():
    layer = nn.Linear(2, 5)
    layer.register_buffer("saved", torch.arange(3.0))
    before = {name: value.clone() for name, value in layer.state_dict().items()}

    def prepare(checkpoint):
        fully_shard(layer)
        for value in layer.parameters():
            nn.init.zeros_(value)  # accelerate's have unused memory
        layer.saved = torch.zeros(3)
        return f"prepared from {checkpoint}"

    with alone_in_a_group():
        found = Engine(SimpleNamespace(model=layer)).shard(prepare, "a checkpoint")
        assert found == "prepared from a checkpoint" and isinstance(layer.weight, DTensor)
        assert torch.equal(layer.weight.full_tensor(), before["weight"])
        assert torch.equal(layer.bias.full_tensor(), before["bias"])
        assert torch.equal(layer.saved, before["saved"])


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


def engine_under(config=None, *, fsdp=False):
    """The engine of a trainer with this DeepSpeed profile, or without DeepSpeed."""
    inside = SimpleNamespace(optimizer="the optimizer")
    plugin = SimpleNamespace(deepspeed_config=config)
    trainer = SimpleNamespace(
        is_deepspeed_enabled=config is not None,
        is_fsdp_enabled=fsdp,
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)),
        optimizer=SimpleNamespace(optimizer=inside),
        model_wrapped=SimpleNamespace(global_steps=5, _running_engine_step=False),
    )
    return Engine(trainer)


@pytest.mark.parametrize(
    ("zero", "sharding", "offloads", "at_any_time"),
    [
        ({}, "zero-0", False, False),
        ({"stage": 1, "zenflow": {}}, "zero-1", False, True),
        ({"stage": 2, "offload_optimizer": None}, "zero-2", False, None),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, "zero-2", False, False),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, "zero-3", True, False),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}},
            "zero-3",
            True,
            True,
        ),
    ],
)
def test_what_a_deepspeed_profile_says_of_the_engine(zero, sharding, offloads, at_any_time):
    engine = engine_under({"zero_optimization": zero, "bf16": {}})
    assert (engine.zero_section, engine.sharding) == (zero, sharding)
    assert engine.zero_section is not zero and engine.offloads_optimizer is offloads
    assert engine.optimizer == "the optimizer"
    if at_any_time is not None:
        assert engine.updates_at_any_time is at_any_time
        engine.begin_step()
        assert engine.has_begun_update is at_any_time


@pytest.mark.parametrize(("fsdp", "sharding"), [(True, "fsdp"), (False, "plain")])
def test_an_engine_without_deepspeed(fsdp, sharding):
    engine = engine_under(fsdp=fsdp)
    engine.begin_step()
    assert (engine.zero_section, engine.sharding, engine.updates_before) == (None, sharding, None)
    assert not engine.offloads_optimizer and not engine.updates_at_any_time
    assert not engine.has_begun_update and engine.optimizer.optimizer == "the optimizer"
    assert engine_under({}).zero_section == {} and engine_under({}).sharding == "zero-0"


@pytest.mark.parametrize("change", [{"global_steps": 6}, {"_running_engine_step": True}, {}])
def test_an_update_has_begun_once_deepspeed_counts_or_runs_it(change):
    engine = engine_under({"zero_optimization": {"stage": 2}})
    engine.begin_step()
    assert not engine.has_begun_update
    vars(engine.trainer.model_wrapped).update(change)
    assert engine.has_begun_update is bool(change)


def test_a_converted_checkpoint_is_loaded_by_deepspeed():
    engine = engine_under(config := {"zero_optimization": {"stage": 2}})
    engine.load_universal()
    assert config == {
        "zero_optimization": {"stage": 2},
        "checkpoint": {"load_universal": True},
    }


# --- rows that several processes share -------------------------------------------------------------------------------


def sharing(parts, *, process=0, attention="varlen", **arguments):
    """A trainer whose rows are shared by this many processes."""
    config = AutoConfig.for_model("llama", **{**TINY["llama"], "num_key_value_heads": 4})
    config._attn_implementation = attention
    handler = SimpleNamespace(sp_attn_implementation="sdpa")
    parallelism = None if parts is None else SimpleNamespace(sp_size=parts, sp_handler=handler)
    given = {"parallelism_config": parallelism, "process_index": process, **arguments}
    trainer = SimpleNamespace(
        args=SimpleNamespace(**given),
        model=SimpleNamespace(config=config),
        model_accepts_loss_kwargs=False,
    )
    return SharedRows(trainer)


@pytest.mark.parametrize(
    ("parts", "process", "number"),
    [(None, 1, None), (1, 1, None), (3, 0, 0), (3, 2, 2), (3, 4, 1), (5, 13, 3)],
)
def test_a_process_has_its_part_of_the_rows_of_its_group(parts, process, number):
    rows = sharing(parts, process=process)
    assert rows.parts == (parts or 1)
    assert rows.part == (None if number is None else PartOfRows(number, parts))


@pytest.mark.parametrize(("parts", "chosen"), [(2, "varlen"), (1, "sdpa")])
def test_accelerate_gets_the_attention_of_the_model_where_rows_are_shared(parts, chosen):
    rows = sharing(parts)
    rows.choose_attention()
    assert rows.trainer.args.parallelism_config.sp_handler.sp_attn_implementation == chosen


@pytest.mark.parametrize(("parts", "attention"), [(2, "sdpa"), (3, "varlen")])
def test_an_attention_or_heads_that_cannot_be_shared_are_refused(parts, attention):
    with pytest.raises(RecipeError, match="sp_size"):
        sharing(parts, attention=attention).choose_attention()


@pytest.mark.heavy
@pytest.mark.parametrize("head_dim", [8, None])
def test_the_engine_averages_as_if_no_rows_were_shared_and_attention_gets_whole_rows(
    head_dim, monkeypatch
):
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    own, made = AttentionInterface()["sdpa"], []

    class Exchange:
        def __init__(self, **options):
            made.append(options)

        def __call__(self, module, query, *others, **options):
            return query, others, options

    monkeypatch.setattr(ulysses_sp, "UlyssesSPAttentionHF", Exchange)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", "accelerate's")
    rows = sharing(2, attention="sdpa", per_device_train_batch_size=3)
    vars(rows.trainer.model.config)["head_dim"] = head_dim
    optimizer = SimpleNamespace(sequence_parallel_size=2)
    engine = SimpleNamespace(
        optimizer=optimizer, seq_parallel_group="the group", checkpoint_mp_rank=1, other=2
    )
    assert rows.take_engine("the loader", engine) == "the loader"
    assert vars(engine) == {
        "optimizer": optimizer,
        "seq_parallel_group": "the group",
        "checkpoint_mp_rank": 0,
        "other": 2,
    }
    assert optimizer.sequence_parallel_size == 1
    assert rows.trainer.model_accepts_loss_kwargs is True
    assert made == [
        {
            "attn": own,
            "batch_size": 3,
            "attn_head_count": 4,
            "attn_head_size": 8,
            "kv_head_count": 4,
            "num_hidden_layers": 2,
            "process_group": "the group",
            "seq_length_is_variable": True,
            "disable_in_eval": True,
        }
    ]
    query, attention = torch.ones(2, 3), ALL_ATTENTION_FUNCTIONS["sdpa"]
    module, options = nn.Module(), {"scaling": 0.5, "position_ids": "of whole rows"}
    same_query, others, training = attention(module.train(), query, "k", "v", **options)
    assert same_query is query and others == ("k", "v")
    assert training.pop("position_ids").tolist() == [[0]] and training == {"scaling": 0.5}
    assert attention(module.eval(), query, "k", "v", **options) == (query, ("k", "v"), options)


def test_the_mean_over_processes_of_shared_losses_is_that_of_the_whole_step():
    labels = [torch.tensor([[3, -100, 5]]), torch.tensor([[-100, 7, 7]])]
    rows = sharing(2, world_size=6)
    assert rows.count_labels([{"shift_labels": one} for one in labels]) == 4
    assert sharing(2).count_labels([]) == 0

    def model(values, num_items_in_batch):
        return SimpleNamespace(loss=values.sum() / num_items_in_batch)

    loss, outputs = rows.compute_loss(model, {"values": torch.tensor([4.0, 5.0])}, 3)
    assert (loss.item(), outputs.loss.item()) == (18.0, 3.0)


# --- gradients in fp32 over several processes ------------------------------------------------------------------------


@pytest.mark.parametrize("may_lack", [True, False, None])
def test_gradients_in_fp32_are_averaged_in_the_last_backward_pass_of_a_step(may_lack):
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5))
    layers[0].bias.requires_grad_(False)
    trained = [layers[1].bias, layers[0].weight, layers[1].weight]
    accelerator = SimpleNamespace(sync_gradients=False)
    trainer = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=[{"params": trained[:1]}, {"params": trained[1:]}]),
        accelerator=accelerator,
        args=SimpleNamespace(ddp_find_unused_parameters=may_lack),
    )
    gradients = engine_file.Gradients(trainer)
    with alone_in_a_group():
        model = DistributedDataParallel(layers)
        assert isinstance(gradients.averaging(model), nullcontext), "by DDP, in half precision"
        assert model.require_backward_grad_sync is True
        gradients.are_fp32 = True
        assert isinstance(gradients.averaging(layers), nullcontext), "one process"
        assert isinstance(gradients.averaging(model), nullcontext), "not the last micro-batch"
        assert model.require_backward_grad_sync is False and gradients.average is None
        accelerator.sync_gradients = True
        with gradients.averaging(model):
            average = gradients.average
            assert isinstance(average, AverageInBackward) and average.is_active
            model(torch.ones(7, 2)).sum().backward()
        assert average.num_sent == len(average.buckets) == 1
        assert average.may_lack is bool(may_lack)
        in_order = [layers[0].weight, layers[1].weight, layers[1].bias]
        assert [id(weight) for weight in average.weights] == list(map(id, in_order))
        with gradients.averaging(model):
            assert gradients.average is average
            model(torch.ones(7, 2)).sum().backward()
