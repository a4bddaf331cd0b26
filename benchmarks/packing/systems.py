"""Ways to fine-tune one model on the same conversations: packed and padded, ours and TRL's; each says the processor
time of its tokens."""

import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import Trainer, TrainerCallback

from cpt.data.rows.build import data_of
from cpt.models.build import build_model
from cpt.recipe.schema import Recipe
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer
from cpt.training.arguments import training_arguments

SEQUENCE_LENGTH = 1024
MEDIAN, SIGMA = 120, 0.9  # of a conversation's tokens: log-normal
CONVERSATIONS = 600
MICRO_BATCH = {"packed": 2, "padded": 8}
WARMING = 2  # steps that are not counted
MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
    "vocab_size": 260,
    "max_position_embeddings": SEQUENCE_LENGTH,
}


def prepare(folder: Path) -> Path:
    """Conversations of log-normal lengths, a byte a token."""
    draw, path = random.Random(0), folder / "conversations.jsonl"
    lines = []
    for _ in range(CONVERSATIONS):
        tokens = min(
            SEQUENCE_LENGTH - 40, max(40, round(math.exp(draw.gauss(math.log(MEDIAN), SIGMA))))
        )
        asked = "".join(draw.choices("abcdefgh ", k=tokens // 3))
        said = "".join(draw.choices("abcdefgh ", k=tokens - tokens // 3))
        lines.append(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": asked},
                        {"role": "assistant", "content": said},
                    ]
                }
            )
        )
    path.write_text("\n".join(lines) + "\n")
    return path


class Turns(TrainerCallback):
    """Processor seconds of the steps after the first ones, and the real tokens that they trained on."""

    def __init__(self, count: Callable[[Any], int]) -> None:
        self.count, self.tokens, self.seconds, self.began = count, 0, 0.0, 0.0

    def watch(self, trainer: Trainer) -> None:
        """Count the tokens of each micro-batch as it comes."""
        step = trainer.training_step

        def counted(model: Any, inputs: Any, *arguments: Any, **options: Any) -> torch.Tensor:
            if trainer.state.global_step >= WARMING:
                self.tokens += self.count(inputs)
            return step(model, inputs, *arguments, **options)

        trainer.training_step = counted  # type: ignore[method-assign]
        trainer.add_callback(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The clock runs from the first step that counts."""
        if state.global_step == WARMING:
            self.began = time.process_time()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = time.process_time() - self.began


def recipe_of(folder: Path, packing: str, steps: int) -> Recipe:
    rows = MICRO_BATCH["padded" if packing == "none" else "packed"]
    return Recipe.model_validate(
        {
            "name": "packing",
            "stage": "sft",
            "output_dir": str(folder / "runs"),
            # On a GPU `auto` takes it: kernels that keep documents apart without a mask. Here torch's SDPA goes
            # document after document.
            "model": {
                "from_scratch": True,
                "config": MODEL,
                "attention": "sdpa" if packing == "none" else "varlen",
            },
            "tokenizer": {
                "path": str(Path(__file__).parents[2] / "recipes" / "tiny" / "tokenizer")
            },
            "data": {
                "sequence_length": SEQUENCE_LENGTH,
                "packing": packing,
                "sources": [{"path": str(folder / "conversations.jsonl")}],
            },
            "budget": {"tokens": steps * rows * SEQUENCE_LENGTH},
            "training": {"per_device_train_batch_size": rows, "logging_steps": 1000},
        }
    )


def ours(folder: Path, packing: str, steps: int, turn: int) -> Turns:
    """A run of this package; of a padded row, the tokens in front of the padding are real."""
    recipe = recipe_of(folder, packing, steps).model_copy(update={"name": f"{packing}-{turn}"})
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = data_of(recipe, tokenizer)
    arguments = training_arguments(recipe, recipe.output_dir / recipe.name, data)
    trainer = build_trainer(
        recipe,
        build_model(recipe.model, tokenizer, packed=packing != "none"),
        tokenizer,
        data,
        arguments,
    )
    pad = tokenizer.pad_token_id
    turns = Turns(lambda inputs: int((inputs["input_ids"] != pad).sum()))
    turns.watch(trainer)
    trainer.train()
    return turns


def trls(folder: Path, packing: str, steps: int, turn: int) -> Turns:
    """TRL's SFTTrainer, which pads to the longest of a micro-batch, or packs."""
    recipe = recipe_of(folder, "none", steps)
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    rows = [json.loads(line) for line in (folder / "conversations.jsonl").read_text().splitlines()]
    packed = packing == "packed"
    arguments = trl.SFTConfig(
        str(folder / "runs" / f"trl-{packing}-{turn}"),
        max_steps=steps,
        per_device_train_batch_size=MICRO_BATCH[packing],
        packing=packed,
        max_length=SEQUENCE_LENGTH,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
    )
    model = build_model(recipe.model, tokenizer)
    trainer = trl.SFTTrainer(
        model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    pad = tokenizer.pad_token_id
    turns = Turns(lambda inputs: int((inputs["input_ids"] != pad).sum()))
    turns.watch(trainer)
    trainer.train()
    return turns


SYSTEMS: dict[str, Callable[[Path, int, int], Turns]] = {
    "cpt, packed": lambda folder, steps, turn: ours(folder, "best_fit", steps, turn),
    "cpt, padded to the row": lambda folder, steps, turn: ours(folder, "none", steps, turn),
    "TRL's SFTTrainer, padded to the longest": lambda folder, steps, turn: trls(
        folder, "padded", steps, turn
    ),
    "TRL's SFTTrainer, packed": lambda folder, steps, turn: trls(folder, "packed", steps, turn),
}
