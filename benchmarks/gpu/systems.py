"""The five systems, each from the same weights over the same rows. A system is a function of a `Start`.

An expert's Trainer has bf16 weights with an fp32 master copy (no autocast), a model compiled as a whole, Liger's
kernels with their defaults, workers that read ahead, and SDPA with `is_causal` and without a mask: under
`torch.compile` transformers cannot see that rows are whole, and builds one. Packed rows are flattened by transformers'
own collator and go through torch's kernel for documents of varying lengths. LoRA runs under autocast, because peft
keeps adapters in fp32. 8-bit moments are bitsandbytes'. The bare loop is plain torch.
"""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)
from transformers.masking_utils import AttentionMaskInterface

from benchmarks.gpu.cases import Case
from benchmarks.gpu.corpus import (
    IGNORED,
    SEED,
    Flattened,
    packed_rows,
    padded,
    single_documents,
    whole_rows,
)
from benchmarks.gpu.initial import WEIGHTS
from benchmarks.gpu.watch import Watch
from cpt.data.rows.build import PreparedData, build_data
from cpt.models.attention import attend_each, has_kernel, torch_kernel
from cpt.optim.groups import parameter_groups
from cpt.planning.fitting import with_chosen_values
from cpt.recipe.schema import Recipe
from cpt.stages.build import build_trainer
from cpt.stages.models import model_for
from cpt.tokenizer.load import load_tokenizer
from cpt.training.arguments import training_arguments

RATE, BETAS, DECAY, CLIPPED_AT, LOGGED_EVERY = 3e-4, (0.9, 0.95), 0.1, 1.0, 10
CAUSAL, FLATTENED = "benchmark_causal", "benchmark_flattened"  # names of attention functions


@dataclass(frozen=True)
class Start:
    case: Case
    folder: Path
    watch: Watch
    parts: int = 1
    """Micro-batches of a step."""

    @property
    def on_gpu(self) -> bool:
        return self.watch.on_gpu

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.on_gpu else "cpu")

    @property
    def backend(self) -> str:
        return "inductor" if self.on_gpu else "aot_eager"

    @property
    def sections(self) -> dict[str, Any]:
        """cpt's recipe: its defaults on a GPU, guards, monitors and the loader included, which a dry run asks for by
        name."""
        case = self.case
        on_cpu = {"use_cpu": True, "torch_compile": True, "torch_compile_backend": self.backend}
        model = {"path": str(self.folder / WEIGHTS), "lora": case.lora, **case.model}
        return {
            "name": case.name,
            "stage": "cpt",
            "seed": SEED,
            "output_dir": str(self.folder / "runs"),
            "model": model if self.on_gpu else {**model, "dtype": "bfloat16", "fused_loss": True},
            "tokenizer": {"path": str(self.folder / "tokenizer")},
            "data": {
                "sequence_length": case.tokens,
                "packing": "best_fit",
                "sources": [{"path": str(self.folder / "corpus.jsonl")}],
            },
            "budget": {"tokens": case.steps * case.rows * case.tokens},
            "optimizer": {
                "learning_rate": RATE,
                "betas": list(BETAS),
                "weight_decay": DECAY,
                **case.optimizer,
            },
            "schedule": {"name": "constant"},
            "safety": {"on_oom": "abort"},
            "evaluation": {"held_out_share": 0.02} if case.evaluates else {},
            "training": {
                "bf16": True,
                "per_device_train_batch_size": case.rows // self.parts,
                "gradient_accumulation_steps": self.parts,
                "max_grad_norm": CLIPPED_AT,
                "logging_steps": LOGGED_EVERY,
                **({} if self.on_gpu else on_cpu),
                **case.training,
            },
        }

    @cached_property
    def recipe(self) -> Recipe:
        """As `cpt train` runs it on this machine."""
        return with_chosen_values(Recipe.model_validate(self.sections))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.recipe.tokenizer, self.recipe.model)

    @cached_property
    def data(self) -> PreparedData:
        return build_data(
            self.recipe.data, self.tokenizer, seed=SEED, evaluation=self.recipe.evaluation
        )

    def initial_model(self, dtype: torch.dtype, attention: str = "sdpa") -> Any:
        """transformers' own model with the weights that all systems start from."""
        model = AutoModelForCausalLM.from_pretrained(
            self.folder / WEIGHTS, dtype=dtype, attn_implementation=attention
        )
        model.config.use_cache = False
        return model


def cpt(start: Start) -> None:
    recipe, tokenizer = start.recipe, start.tokenizer
    folder = recipe.output_dir / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    arguments = training_arguments(recipe, folder, start.data)
    model = model_for(recipe, tokenizer, arguments)
    trainer: Any = build_trainer(recipe, model, tokenizer, start.data, arguments)
    trainer.add_callback(start.watch)
    start.watch.keep_losses_of(trainer)
    trainer._save_checkpoint = lambda *_: None  # the model is of no use to anyone
    trainer.train()


def trainer(start: Start) -> None:
    run_trainer(start, {})


def liger(start: Start) -> None:
    """With all of Liger's kernels for the architecture, as `use_liger_kernel=True` chooses them."""
    run_trainer(start, {"use_liger_kernel": has_liger(start)})


def expert(start: Start) -> None:
    """The Trainer set up as the top of this file describes."""
    options: dict[str, Any] = {
        "use_liger_kernel": has_liger(start),
        "torch_compile": True,
        "torch_compile_backend": start.backend,
        "optim": "adamw_bnb_8bit" if start.case.in_8_bit and start.on_gpu else "adamw_torch_fused",
        "logging_nan_inf_filter": False,
    }
    if start.on_gpu:
        options |= {
            "dataloader_num_workers": 2,
            "dataloader_persistent_workers": True,
            "dataloader_prefetch_factor": 4,
        }
    run_trainer(start, options, is_expert=True)


def has_liger(start: Start) -> bool:
    """Liger's kernels need a GPU; a dry run goes without them."""
    return start.on_gpu and importlib.util.find_spec("liger_kernel") is not None


def run_trainer(start: Start, options: dict[str, Any], *, is_expert: bool = False) -> None:
    """Train with Hugging Face's Trainer on the same rows. Without an expert, documents of packed rows come one at a
    time, padded."""
    case = start.case
    register_attention()
    in_bfloat16 = is_expert or case.in_8_bit or case.lora is not None
    attention = (FLATTENED if case.packed else CAUSAL) if is_expert else "sdpa"
    model = start.initial_model(torch.bfloat16 if in_bfloat16 else torch.float32, attention)
    if case.lora is not None:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **case.lora))
    arguments = TrainingArguments(
        output_dir=str(start.folder / "plain"),
        max_steps=case.steps,
        per_device_train_batch_size=(case.rows if is_expert or not case.packed else case.documents)
        // start.parts,
        gradient_accumulation_steps=start.parts,
        bf16=not is_expert or case.lora is not None,
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
        gradient_checkpointing=case.checkpoints,
        **options,
    )
    kind = whole_rows if not case.packed else packed_rows if is_expert else single_documents
    chosen: dict[str, Any] = {}
    if case.packed:
        chosen["data_collator"] = Flattened(case.tokens) if is_expert else padded
    if is_expert and case.lora is None and not case.in_8_bit:
        chosen["optimizer_cls_and_kwargs"] = (
            MasterAdamW,
            {"lr": RATE, "betas": BETAS, "weight_decay": DECAY},
        )
    plain = Trainer(
        model,
        arguments,
        train_dataset=kind(start.data.rows, case.steps * case.rows),
        callbacks=[start.watch],
        **chosen,
    )
    start.watch.keep_losses_of(plain)
    plain.train()


def bare(start: Start) -> None:
    """Nothing but the step, in plain torch: bf16 weights with an fp32 master copy, the model compiled as a whole, and
    its loss too."""
    case = start.case
    register_attention()
    model = start.initial_model(torch.bfloat16, CAUSAL).to(start.device).train()
    optimizer = MasterAdamW(parameter_groups(model), lr=RATE, betas=BETAS, weight_decay=DECAY)
    layers = torch.compile(model.base_model, dynamic=False, backend=start.backend)
    loss_of = torch.compile(loss_of_head, dynamic=False, backend=start.backend)
    head = model.get_output_embeddings().weight
    size = case.rows // start.parts
    rows = whole_rows(start.data.rows, case.steps * case.rows)
    for step in range(case.steps):
        for part in range(start.parts):
            first = step * case.rows + part * size
            batch = [
                torch.stack([rows[first + n][name] for n in range(size)])
                for name in ("input_ids", "labels")
            ]
            ids, labels = (
                (one.pin_memory() if start.on_gpu else one).to(start.device, non_blocking=True)
                for one in batch
            )
            loss = loss_of(layers(input_ids=ids).last_hidden_state, head, labels) / start.parts
            loss.backward()
            start.watch.losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_AT)
        optimizer.step()
        optimizer.zero_grad()
        start.watch.end(step + 1)


def loss_of_head(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the next tokens, in fp32 where torch.compile fuses it."""
    targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1).float(), targets.flatten())


class MasterAdamW(torch.optim.AdamW):
    """torch's fused AdamW over fp32 copies of bf16 weights. It is not cpt's, so that changes there do not change the
    opponents."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
        self.trained = [parameter for group in groups for parameter in group["params"]]
        self.masters = [parameter.detach().float().clone() for parameter in self.trained]
        copies = iter(self.masters)
        super().__init__(
            [{**group, "params": [next(copies) for _ in group["params"]]} for group in groups],
            fused=True,
            **options,
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for master, parameter in zip(self.masters, self.trained, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        super().step()
        with torch.no_grad():
            torch._foreach_copy_(self.trained, self.masters)
        super().zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.trained:
            parameter.grad = None


def register_attention() -> None:
    """Make two attention functions known to transformers, and that they need no mask."""
    for name, function in {CAUSAL: causal_attention, FLATTENED: flattened_attention}.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, lambda *_, **__: None)


def causal_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA over whole rows, with keys and values of grouped heads as they are. Tensors are [rows, heads, tokens,
    width]."""
    grouped = key.shape[1] != query.shape[1]
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).contiguous(), None


def flattened_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """torch's kernel for documents of varying lengths, over one flattened row with the bounds that the collator
    passes."""
    tensors = (states.transpose(1, 2)[0].contiguous() for states in (query, key, value))
    attend = torch_kernel if has_kernel(query, query.dtype) else attend_each
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(*tensors, options["cu_seq_lens_q"], options["max_length_q"], scale, None)[
        None
    ], None


RUN: dict[str, Callable[[Start], None]] = {
    "bare": bare,
    "cpt": cpt,
    "trainer": trainer,
    "liger": liger,
    "expert": expert,
}
