"""Real steps of a stage's trainer on rows that are full, with every storage that is alive added up."""

from pathlib import Path

import torch
from example_runs import Endless, Prepared
from tiny_models import make_tokenizer
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from cpt.hf_internals import IGNORED
from cpt.planning.fake_model import PeakOfStorages
from cpt.recipe.schema import Recipe
from cpt.stages.build import stage_trainer
from cpt.stages.models import model_for
from cpt.training.arguments import training_arguments

LENGTH = 128
SHAPE = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4000,
}


class EndsMeasured(Exception):  # noqa: N818 - it is no error
    """Two steps are enough: the first makes the optimizer's states."""


class Measures(TrainerCallback):
    """The peak of the second step, before anything is saved."""

    def __init__(self, storages: PeakOfStorages) -> None:
        self.storages = storages

    def on_step_end(self, args, state, control, **_):
        if state.global_step >= 2:
            raise EndsMeasured
        self.storages.peak = self.storages.now


def judge_length(completions, **_) -> list[float]:
    """A reward."""
    return [float(len(said) % 7) for said in completions]


def full_rows(stage: str) -> tuple[str, list[dict]]:
    """Form of the data, and rows as long as rows may be."""
    half = [10 + number % 60 for number in range(LENGTH // 2)]
    if stage in ("dpo", "reward", "orpo", "cpo"):
        return "preference", [{"prompt_ids": half, "chosen_ids": half, "rejected_ids": half[::-1]}]
    if stage == "kto":
        return "unpaired", [
            {"prompt_ids": half, "completion_ids": half, "label": good} for good in (True, False)
        ]
    if stage in ("distill", "cpt"):
        ids = torch.tensor(half * 2)
        labels = torch.where(torch.arange(LENGTH) < 1, IGNORED, ids)
        return "conversation", [
            {"input_ids": ids, "labels": labels, "position_ids": torch.arange(LENGTH)}
        ]
    return "prompt", [
        {"prompt": " ".join(f"w{10 + number % 60}" for number in range(LENGTH)), "answer": "w5"}
    ]


def recipe_of(
    stage: str,
    folder: Path,
    *,
    lora: dict | None = None,
    shape: dict | None = None,
    replay_kl: float | None = None,
    **training,
) -> Recipe:
    """Rows of 128 tokens, two at once."""
    form, _ = full_rows(stage)
    written = {"max_completion_length": 32} if form == "prompt" else {}
    if stage in ("grpo", "rloo"):
        written["num_generations"] = 2
    return Recipe.model_validate(
        {
            "name": "run",
            "stage": stage,
            "output_dir": str(folder),
            "model": {
                "from_scratch": True,
                "config": shape or SHAPE,
                **({} if lora is None else {"lora": lora}),
            },
            "tokenizer": {"path": "made"},
            "data": {
                "sequence_length": LENGTH,
                "sources": [{"path": "made", "replay_kl": replay_kl}],
            },
            "budget": {"tokens": 10**6},
            "rewards": ["stage_steps:judge_length"] if form == "prompt" else [],
            "training": {
                "use_cpu": True,
                "per_device_train_batch_size": 2,
                "logging_steps": 1,
                **written,
                **training,
            },
        }
    )


def measured_peak(recipe: Recipe) -> int:
    """Bytes of all storages at the most in the second step, with all weights."""
    form, rows = full_rows(recipe.stage)
    tokenizer, folder = make_tokenizer(), recipe.output_dir / recipe.name
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    data = Prepared(Endless(rows), form, 10**6, num_tokens=10**9)
    arguments = training_arguments(recipe, folder, data)
    model = model_for(recipe, tokenizer, arguments)
    trainer = stage_trainer(recipe, model, tokenizer, data, arguments)
    trainer.remove_callback(PrinterCallback)
    with PeakOfStorages() as storages:
        trainer.add_callback(Measures(storages))
        for held in (
            trainer.model,
            *(vars(trainer).get(name) for name in ("ref_model", "teacher", "base")),
        ):
            for tensor in () if held is None else (*held.parameters(), *held.buffers()):
                storages.watch(tensor.untyped_storage())
        try:
            trainer.train()
        except EndsMeasured:
            return storages.peak
    raise AssertionError("it ended before two steps")
