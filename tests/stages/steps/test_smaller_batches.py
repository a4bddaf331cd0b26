import json

import pytest
import torch
from tiny_faults import STEPS, events, losses, same, trainer_of, weights

from cpt.errors import ResourceError
from cpt.runs.events import read_events

MEMORY = {"training": {"per_device_train_batch_size": 4, "logging_steps": 1}}


def too_large_above(limits):
    """Out of memory with more rows than limits[step], from that step on."""

    def fault(trainer, inputs, loss):
        limit = min((rows for step, rows in limits.items() if trainer.state.global_step + 1 >= step), default=99)
        if len(inputs["input_ids"]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return loss

    return fault


@pytest.mark.slow
def test_out_of_memory_the_step_is_redone_with_the_same_rows_and_nothing_is_lost(tiny_recipe, tmp_path):
    reference = trainer_of(tiny_recipe, tmp_path / "reference", **MEMORY)
    trainer = trainer_of(tiny_recipe, tmp_path / "small", faults=too_large_above({7: 2, 11: 1}), **MEMORY)
    for one in (reference, trainer):
        one.train()
    told = [(event["step"], event["micro_batch"], event["restart"]) for event in read_events(trainer.run_folder)]
    assert told == [(7, 2, False), (11, 1, False)]
    assert losses(trainer) == pytest.approx(losses(reference), rel=1e-5)
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (1, 4)
    expected = weights(reference)
    assert all(torch.allclose(tensor, expected[name], atol=1e-5) for name, tensor in weights(trainer).items())


@pytest.mark.slow
def test_memory_that_ends_in_the_backward_leaves_no_gradient_behind(tiny_recipe, tmp_path):
    class EndsInBackward(torch.autograd.Function):
        @staticmethod
        def forward(context, loss):
            return loss.clone()

        @staticmethod
        def backward(context, gradient):
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    seen = []

    def fault(trainer, inputs, loss):
        """In the second of two micro-batches, when the first has left its gradient."""
        if loss is not None and trainer.state.global_step == 6 and len(inputs["input_ids"]) == 2:
            seen.append(len(inputs["input_ids"]))
            return EndsInBackward.apply(loss) if len(seen) == 2 else loss
        return loss

    reference, trainer = (
        trainer_of(tiny_recipe, tmp_path / "reference"),
        trainer_of(tiny_recipe, tmp_path / "small", faults=fault),
    )
    for one in (reference, trainer):
        one.train()
    assert seen == [2, 2] and losses(trainer) == pytest.approx(losses(reference), rel=1e-5)


@pytest.mark.slow
def test_the_next_start_knows_what_fitted(tiny_recipe, tmp_path):
    trainer = trainer_of(
        tiny_recipe, tmp_path, faults=too_large_above({3: 2}), **MEMORY, checkpoints={"every_steps": 4, "keep": None}
    )
    trainer.train()
    assert json.loads((trainer.run_folder / "learned.json").read_text()) == {"micro_batch": {"1": 2}}
    again = trainer_of(tiny_recipe, tmp_path, faults=too_large_above({1: 2}), **MEMORY)
    assert (again.args.per_device_train_batch_size, again.args.gradient_accumulation_steps) == (2, 2)
    again.train(resume_from_checkpoint=trainer.run_folder / "checkpoint-8")
    assert same(weights(again), weights(trainer)) and len(events(again, "out_of_memory")) == 1


@pytest.mark.slow
def test_where_one_row_is_too_much_it_says_what_helps(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path, faults=too_large_above({5: 0}), **MEMORY)
    with pytest.raises(ResourceError, match="step 5 with a single row of 64 tokens.*gradient_checkpointing"):
        trainer.train()
    assert [event["micro_batch"] for event in read_events(trainer.run_folder)] == [2, 1]


def test_a_run_may_be_told_to_end_instead(tiny_recipe, tmp_path):
    trainer = trainer_of(tiny_recipe, tmp_path, faults=too_large_above({5: 2}), **MEMORY, safety={"on_oom": "abort"})
    with pytest.raises(ResourceError, match="`safety.on_oom` is abort"):
        trainer.train()
    assert not (trainer.run_folder / "learned.json").exists()


def test_another_error_is_not_taken_for_it(tiny_recipe, tmp_path):
    def fault(trainer, inputs, loss):
        if trainer.state.global_step == 3:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        return loss

    with pytest.raises(RuntimeError, match="multiplied"):
        trainer_of(tiny_recipe, tmp_path, faults=fault).train()


@pytest.mark.slow
def test_bad_steps_are_skipped_with_smaller_micro_batches_too(tiny_recipe, tmp_path):
    memory = too_large_above({7: 2})

    def fault(trainer, inputs, loss):
        loss = memory(trainer, inputs, loss)
        return loss * float("nan") if loss is not None and trainer.state.global_step + 1 in (7, 12) else loss

    trainer = trainer_of(tiny_recipe, tmp_path, faults=fault, **MEMORY)
    trainer.train()
    assert (
        events(trainer, "nan_skipped") == [("nan_skipped", 7), ("nan_skipped", 12)]
        and trainer.state.global_step == STEPS
    )
