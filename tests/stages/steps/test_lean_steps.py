import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from cpt.stages.steps.lean_steps import LeanSteps, ListeningCallbacks, labels_that_count, listens, without_walks
from tests.tiny_faults import trainer_of

WALKS = ("train", "zero_grad")


def walked(monkeypatch, run):
    """How often a model was walked through by these methods of `nn.Module` and of transformers."""
    calls = {}

    def count(owner, name):
        whole = getattr(owner, name)

        def counted(self, *arguments, **options):
            calls[name] = calls.get(name, 0) + 1
            return whole(self, *arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    count(PreTrainedModel, "num_parameters")
    count(nn.Module, "zero_grad")
    count(PreTrainedModel, "train")
    run()
    return calls


def test_a_step_walks_through_no_modules(tiny_recipe, tmp_path, monkeypatch):
    trainer = trainer_of(tiny_recipe, tmp_path)
    trainer._save_checkpoint = lambda *_: None
    calls = walked(monkeypatch, trainer.train)
    steps = trainer.state.global_step
    assert steps >= 8
    assert sum(calls.values()) < steps, calls
    assert calls.get("num_parameters", 0) <= 2


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_plain_micro_batch_is_the_trainers_own_bit_for_bit(tiny_recipe, tmp_path, accumulation):
    """Of every version of transformers that is installed: what it does beside forward and backward pass must be
    nothing."""
    training = {**tiny_recipe["training"], "per_device_train_batch_size": 4 // accumulation}
    seen = []
    for plain in (True, False):
        trainer = trainer_of(tiny_recipe, tmp_path / str(plain), training=training)
        trainer._save_checkpoint = lambda *_: None
        trainer.only_needs_backward = lambda plain=plain, really=trainer.only_needs_backward: plain and really()
        trainer.train()
        assert trainer.is_plain is plain
        assert trainer.args.gradient_accumulation_steps == accumulation
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        seen.append((losses, torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])))
    assert seen[0][0] == seen[1][0]
    assert torch.equal(seen[0][1], seen[1][1])


@pytest.mark.parametrize(
    "change",
    [
        lambda trainer: setattr(trainer.args, "torch_empty_cache_steps", 3),
        lambda trainer: setattr(trainer, "loss_is_scaled_for_ga", True),
        lambda trainer: setattr(
            trainer, "compute_loss_func", lambda outputs, labels, num_items_in_batch: outputs.loss
        ),
        lambda trainer: setattr(trainer.accelerator, "backward", lambda loss: loss.backward()),
    ],
)
def test_whoever_changes_how_a_step_is_made_gets_the_trainers_own(tiny_recipe, tmp_path, change):
    trainer = trainer_of(tiny_recipe, tmp_path)
    assert trainer.only_needs_backward()
    change(trainer)
    assert not trainer.only_needs_backward()


def test_the_trainers_own_count_of_operations_is_kept(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path)
    for tokens in (8, 24):
        inputs = {"input_ids": torch.zeros(2, tokens, dtype=torch.int64)}
        assert trainer.floating_point_ops(inputs) == Trainer.floating_point_ops(trainer, inputs) > 0


@pytest.mark.parametrize("counts", [[4], [3, 7, 1]])
def test_labels_are_counted_as_the_trainer_counts_them(tiny_recipe, tmp_path, counts):
    trainer = trainer_of(tiny_recipe, tmp_path)
    batches = [
        {"labels": torch.tensor([[5] * (count + 1) + [-100] * (8 - count)])} for count in counts
    ]  # the first is never predicted
    theirs = Trainer._get_num_items_in_batch(trainer, batches, torch.device("cpu"))
    assert trainer._get_num_items_in_batch(batches, torch.device("cpu")) == int(theirs) == sum(counts)
    assert isinstance(trainer._get_num_items_in_batch(batches, torch.device("cpu")), int)


def test_labels_that_are_elsewhere_or_shifted_already_are_left_to_the_trainer():
    assert labels_that_count({"labels": torch.zeros(1, 4, device="meta")}) is None
    assert labels_that_count({"labels": torch.zeros(1, 4), "shift_labels": torch.zeros(1, 4)}) is None
    assert labels_that_count([1, 2]) is None
    assert labels_that_count({"labels": torch.tensor([[5, -100, 7]])}) == 1


def test_a_model_goes_back_to_training_after_an_evaluation_and_forgets_all_gradients():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    outer = nn.Sequential(inner)
    with without_walks(outer, inner):
        inner.eval()
        assert outer.training, "as DistributedDataParallel, which nobody told"
        outer.train()
        assert all(module.training for module in outer.modules())
        outer(torch.ones(1, 2)).sum().backward()
        outer.zero_grad()
        assert all(parameter.grad is None for parameter in outer.parameters())
        outer(torch.ones(1, 2)).sum().backward()
        outer.zero_grad(set_to_none=False)
        assert all(parameter.grad.abs().sum() == 0 for parameter in outer.parameters())
        outer.train(False)
        assert not inner[1].training
    assert not set(WALKS) & vars(outer).keys()


def test_layers_in_evaluation_under_an_adapter_that_trains_begin_to_train():
    outer = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    outer[0].eval()  # as `from_pretrained` leaves a base
    with without_walks(outer, outer):
        outer.train()
        assert outer[0][0].training


def test_the_methods_come_back_after_an_error():
    model = nn.Linear(1, 1)
    with pytest.raises(KeyError), without_walks(model, model):
        raise KeyError
    assert not set(WALKS) & vars(model).keys()


class Hears(TrainerCallback):
    def __init__(self):
        self.heard = []

    def on_step_end(self, args, state, control, **kwargs):
        self.heard.append(sorted(kwargs))
        control.should_log = True


class AddsAnother(TrainerCallback):
    def __init__(self, handler):
        self.handler = handler

    def on_step_end(self, args, state, control, **kwargs):
        self.handler.add_callback(Hears)
        self.handler.remove_callback(self)


def test_callbacks_hear_what_the_trainers_own_handler_tells_them_and_the_others_are_not_called():
    class Deaf(TrainerCallback):
        pass

    deaf, hears = Deaf(), Hears()
    handler = ListeningCallbacks(CallbackHandler([deaf, hears], None, None, None, None))

    control = TrainerControl()
    assert handler.on_step_begin(None, TrainerState(), control) is control
    assert handler.on_step_end(None, TrainerState(), control).should_log
    theirs = Hears()
    CallbackHandler([theirs], None, None, None, None).on_step_end(None, TrainerState(), TrainerControl())
    assert hears.heard == theirs.heard
    assert (listens(deaf, "on_step_end"), listens(hears, "on_step_end")) == (False, True)


def test_a_callback_may_add_and_remove_others_on_the_way():

    handler = ListeningCallbacks(CallbackHandler([], None, None, None, None))
    handler.add_callback(AddsAnother(handler))
    handler.on_step_end(None, TrainerState(), TrainerControl())
    assert [type(callback) for callback in handler.callbacks] == [Hears]
    handler.on_step_end(None, TrainerState(), TrainerControl())
    assert len(handler.callbacks[0].heard) == 1


@pytest.mark.slow
def test_old_objects_are_set_apart_while_it_trains_and_given_back(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path)
    trainer._save_checkpoint = lambda *_: None
    frozen = []
    trainer.add_callback(
        type("Looks", (TrainerCallback,), {"on_step_end": lambda *_, **__: frozen.append(gc.get_freeze_count())})
    )
    trainer.train()
    assert min(frozen) > 10_000
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()


def test_the_search_for_a_package_is_made_once():
    import accelerate.optimizer

    accelerate.optimizer.is_lomo_available()
    before = accelerate.optimizer.is_lomo_available.cache_info().hits
    accelerate.optimizer.is_lomo_available()
    assert accelerate.optimizer.is_lomo_available.cache_info().hits == before + 1


def test_batches_with_a_number_are_copied_without_waiting():
    copies = []

    class Recorded(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.Tensor.to:
                copies.append(kwargs)
            return super().__torch_function__(function, types, args, kwargs)

    trainer = SimpleNamespace(args=SimpleNamespace(device=torch.device("meta")), is_deepspeed_enabled=False)
    batch = {"input_ids": torch.zeros(2, 8).as_subclass(Recorded), "max_length_q": 128}
    moved = LeanSteps._prepare_inputs(trainer, batch)
    assert moved["input_ids"].is_meta and moved["max_length_q"] == 128 and copies == [{"non_blocking": True}]
