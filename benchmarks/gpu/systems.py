"""The five systems, each from the same initial weights over the same rows; a system is a function of a `Start`."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Trainer, TrainingArguments

from benchmarks.gpu.cases import Case
from benchmarks.gpu.corpus import IGNORED, SEED, SingleDocuments, WholeRows, padded
from benchmarks.gpu.initial import WEIGHTS
from benchmarks.gpu.watch import Watch
from cpt.data.build import build_data
from cpt.data.prepared import PreparedData
from cpt.models.build import build_model
from cpt.optim.groups import parameter_groups
from cpt.recipe.schema import Recipe
from cpt.stages.arguments import training_arguments
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer

RATE, BETAS, DECAY, CLIPPED_AT, LOGGED_EVERY = 3e-4, (0.9, 0.95), 0.1, 1.0, 10


@dataclass(frozen=True)
class Start:
    """What a system begins with."""

    case: Case
    folder: Path
    watch: Watch
    parts: int = 1
    """Micro-batches that a step is divided into, where one has no room."""
    backend: str = "inductor"
    """Of all that is compiled."""

    @property
    def on_gpu(self) -> bool:
        """Else it is a dry run."""
        return self.watch.on_gpu

    @property
    def device(self) -> torch.device:
        """Where models train."""
        return torch.device("cuda" if self.on_gpu else "cpu")

    @cached_property
    def recipe(self) -> Recipe:
        """Ours, with everything on."""
        case = self.case
        training = {
            "per_device_train_batch_size": case.rows // self.parts,
            "gradient_accumulation_steps": self.parts,
            "max_grad_norm": CLIPPED_AT,
            "logging_steps": LOGGED_EVERY,
            "torch_compile_backend": self.backend,
            "dataloader_num_workers": 2 if self.on_gpu else 0,
            "use_cpu": not self.on_gpu,
            **case.training,
        }
        sections = {
            "name": f"{case.name}",
            "stage": "cpt",
            "seed": SEED,
            "output_dir": str(self.folder / "runs"),
            "model": {"path": str(self.folder / WEIGHTS), "dtype": "bfloat16", "lora": case.lora},
            "tokenizer": {"path": str(self.folder / "tokenizer")},
            "data": {"sequence_length": case.tokens, "packing": "best_fit", "sources": [{"path": str(self.folder / "corpus.jsonl")}]},
            "budget": {"tokens": case.steps * case.rows * case.tokens},
            "optimizer": {"learning_rate": RATE, "betas": list(BETAS), "weight_decay": DECAY, **case.optimizer},
            "schedule": {"name": "constant"},
            "safety": {"on_oom": "abort"},
            "training": training,
        }
        return Recipe.model_validate(sections)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Of whole words."""
        return load_tokenizer(self.recipe.tokenizer, self.recipe.model)

    @cached_property
    def data(self) -> PreparedData:
        """As cpt reads it."""
        return build_data(self.recipe.data, self.tokenizer, seed=SEED)

    def initial_model(self, dtype: torch.dtype) -> Any:
        """The weights that all begin with, in transformers' own model with its default attention."""
        model = AutoModelForCausalLM.from_pretrained(self.folder / WEIGHTS, dtype=dtype, attn_implementation="sdpa")
        model.config.use_cache = False
        return model


def cpt(start: Start) -> None:
    """Through `build_trainer`, guards and monitors included."""
    recipe, tokenizer = start.recipe, start.tokenizer
    folder = recipe.output_dir / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    arguments = training_arguments(recipe, folder, start.data)
    model = build_model(recipe.model, tokenizer, seed=SEED, dtype=torch.bfloat16, packed=True)
    trainer: Any = build_trainer(recipe, model, tokenizer, start.data, arguments)
    trainer.add_callback(start.watch)
    start.watch.keep_losses_of(trainer)
    trainer._save_checkpoint = lambda *_: None  # 50 steps are not to be kept
    trainer.train()


def trainer(start: Start) -> None:
    """With its defaults, in bfloat16 as far as it goes by itself."""
    run_trainer(start, {})


def liger(start: Start) -> None:
    """With Liger's kernels, all that it has for the architecture."""
    run_trainer(start, {"use_liger_kernel": has_liger(start)})


def expert(start: Start) -> None:
    """What somebody who knows the Trainer well would write."""
    reading = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 4} if start.on_gpu else {}
    run_trainer(
        start,
        {
            "use_liger_kernel": has_liger(start),
            "torch_compile": True,
            "torch_compile_backend": start.backend,
            "optim": "adamw_torch_fused",
            "logging_nan_inf_filter": False,
            **reading,
        },
    )


def has_liger(start: Start) -> bool:
    """Its kernels need a GPU; a dry run goes without."""
    return start.on_gpu and importlib.util.find_spec("liger_kernel") is not None


def run_trainer(start: Start, options: dict[str, Any]) -> None:
    """Hugging Face's Trainer over the same rows; of packed ones it takes the documents one by one, and pads them."""
    case = start.case
    model = start.initial_model(torch.bfloat16 if case.half_weights or case.lora else torch.float32)
    if case.lora is not None:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **case.lora))
    arguments = TrainingArguments(
        output_dir=str(start.folder / "plain"),
        max_steps=case.steps,
        per_device_train_batch_size=(case.documents if case.packed else case.rows) // start.parts,
        gradient_accumulation_steps=start.parts,
        bf16=True,
        learning_rate=RATE,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=DECAY,
        max_grad_norm=CLIPPED_AT,
        lr_scheduler_type="constant",
        logging_steps=LOGGED_EVERY,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
        use_cpu=not start.on_gpu,
        dataloader_pin_memory=start.on_gpu,
        **({"gradient_checkpointing": True} if case.checkpoints else {}),
        **options,
    )
    kind = SingleDocuments if case.packed else WholeRows
    rows = kind(start.data.rows, case.steps * case.rows)
    collator = {"data_collator": padded} if case.packed else {}
    plain = Trainer(model, arguments, train_dataset=rows, callbacks=[start.watch], **collator)
    start.watch.keep_losses_of(plain)
    plain.train()


def bare(start: Start) -> None:
    """Nothing but the step, the whole model compiled, under autocast; the head's loss by Liger where that is there."""
    case = start.case
    model = start.initial_model(torch.float32).to(start.device).train()
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True)
    layers = torch.compile(model.base_model, dynamic=False, backend=start.backend)
    loss_of_head = fused_loss(start)
    size = case.rows // start.parts
    rows = WholeRows(start.data.rows, case.steps * case.rows)
    for step in range(case.steps):
        for part in range(start.parts):
            first = step * case.rows + part * size
            batch = {name: torch.stack([rows[first + n][name] for n in range(size)]) for name in ("input_ids", "labels")}
            batch = {
                name: (value.pin_memory() if start.on_gpu else value).to(start.device, non_blocking=True) for name, value in batch.items()
            }
            with torch.autocast(start.device.type, dtype=torch.bfloat16):
                hidden = layers(input_ids=batch["input_ids"]).last_hidden_state
                loss = loss_of_head(hidden, model.get_output_embeddings().weight, batch["labels"]) / start.parts
            loss.backward()
            start.watch.losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_AT)
        optimizer.step()
        optimizer.zero_grad()
        start.watch.end(step + 1)


def fused_loss(start: Start) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """(hidden states, the head's weight, labels) -> the mean loss."""
    if has_liger(start) and start.case.config["vocab_size"] >= 2**16:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # an extra

        kernel = LigerFusedLinearCrossEntropyLoss()
        return lambda hidden, weight, labels: kernel(weight, hidden[:, :-1].flatten(0, 1).to(weight.dtype), labels[:, 1:].flatten())

    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = F.linear(hidden, weight)
        shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten())

    return torch.compile(loss, dynamic=False, backend=start.backend)


RUN: dict[str, Callable[[Start], None]] = {"bare": bare, "cpt": cpt, "trainer": trainer, "liger": liger, "expert": expert}
