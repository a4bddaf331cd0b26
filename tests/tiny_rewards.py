"""A bandit of words for the stages that learn from rewards: each prompt has one right answer, among as many words as
the tokenizer has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from transformers.trainer_callback import PrinterCallback

from cpt.recipe.schema import Recipe
from cpt.stages.build import stage_trainer
from cpt.stages.models import model_for
from cpt.training.arguments import training_arguments

WORDS = 20
MODEL = {
    "model_type": "llama",
    "vocab_size": WORDS + 4,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
TRAINING = {
    "use_cpu": True,
    "per_device_train_batch_size": 32,
    "max_completion_length": 1,
    "logging_steps": 1,
}


def words() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "<pad>": 1, "<bos>": 2, "<eos>": 3} | {
        f"w{number}": number + 4 for number in range(WORDS)
    }
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    special = {f"{name}_token": f"<{name}>" for name in ("unk", "pad", "bos", "eos")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


class Prompts:
    """Four questions, over and over."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {
            "prompt": f"w{number % 4} w9",
            "answer": f"w{(7 * number + 3) % 4 + 10}",
            "number": number,
        }


def bandit(
    stage: str, folder: Path, *, steps: int = 60, learning_rate: float = 1e-2, **sections: Any
) -> Recipe:
    """A recipe of so many steps."""
    groups = {"num_generations": 8} if stage in ("grpo", "rloo") else {}
    training = TRAINING | groups | sections.pop("training", {})
    completions = training["per_device_train_batch_size"] * training.get(
        "gradient_accumulation_steps", 1
    )
    given: dict[str, Any] = {
        "name": "run",
        "output_dir": folder,
        "stage": stage,
        "model": {"from_scratch": True, "config": MODEL},
        "data": {"sources": [{"path": "prompts.jsonl"}], "sequence_length": 16},
        "budget": {"tokens": steps * completions * 16},
        "optimizer": {"name": "adamw", "learning_rate": learning_rate, "weight_decay": 0.0},
        "schedule": {"name": "constant"},
        "rewards": ["exact_match"],
        **sections,
        "training": training,
    }
    return Recipe(**given)


def quiet_trainer(recipe: Recipe, tokenizer: PreTrainedTokenizerFast | None = None) -> Any:
    """As a run builds it, but for the data and the callbacks."""
    data: Any = SimpleNamespace(
        rows=Prompts(), held_out={}, num_tokens=64, num_rows=4, form="prompt"
    )
    arguments = training_arguments(recipe, recipe.output_dir / recipe.name, data)
    tokenizer = tokenizer or words()
    trainer = stage_trainer(
        recipe, model_for(recipe, tokenizer, arguments), tokenizer, data, arguments
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def rewards_of(trainer: Any, name: str = "exact_match") -> list[float]:
    """The mean of a reward at each step."""
    return [
        entry[f"rewards/{name}/mean"]
        for entry in trainer.state.log_history
        if f"rewards/{name}/mean" in entry
    ]


def losses_of(trainer: Any) -> list[float]:
    """Of each step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights_of(trainer: Any) -> list[torch.Tensor]:
    """All that is trained, in the order of names."""
    return [parameter.detach() for _, parameter in sorted(trainer.model.named_parameters())]
