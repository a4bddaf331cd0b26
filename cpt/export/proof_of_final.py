"""Compare the model that a run exports with the trained one, before the run counts as finished."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)

from cpt.checkpoints.model_folder import weight_files
from cpt.distributed import print_once
from cpt.errors import CheckpointError
from cpt.export.proof import TOLERANCES, brings_its_code, logits_of, proof_text
from cpt.hf_internals import without_zero3

# A router of experts may choose others after a rounding, which changes single positions by more than the tolerance.
POSITIONS = 0.9  # share that must agree
MOST_OF_THE_MEMORY = 0.8


@dataclass(frozen=True)
class TrainedLogits:
    ids: list[int]
    logits: torch.Tensor  # [T, V] in fp32
    dtype: torch.dtype  # of the arithmetic


def trained_logits(trainer: Trainer, tokenizer: PreTrainedTokenizerBase) -> TrainedLogits | str:
    """The trained model's logits on a passage, or why they cannot be compared; every process must call it."""
    model = trainer.model
    if not isinstance(model, PreTrainedModel | PeftModel):
        return f"it is a {type(model).__name__}"
    parallelism = trainer.args.parallelism_config
    if parallelism is not None and parallelism.sp_size > 1:
        return "its processes share rows"
    if getattr(model, "is_quantized", False):
        return "its base was quantized for the training"
    ids = proof_text(tokenizer, model.config).ids
    with torch.compiler.set_stance("force_eager"):  # it would compile for this length
        logits = logits_of(model, ids)
    return TrainedLogits(ids, logits, dtype_of_arithmetic(trainer, model))


def dtype_of_arithmetic(trainer: Trainer, model: PreTrainedModel | PeftModel) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if trainer.args.bf16 or torch.bfloat16 in dtypes:
        return torch.bfloat16
    if trainer.args.fp16 or torch.float16 in dtypes or trainer.args.device.type != "cpu":
        return torch.float16  # on a GPU, TF32 has as many digits
    return torch.float32


def check_final(folder: Path, trained: TrainedLogits | str) -> None:
    """CheckpointError if the model in a folder has other logits than the trained one; on the main process."""
    if isinstance(trained, TrainedLogits):
        size = sum(file.stat().st_size for file in weight_files(folder))
        if size > MOST_OF_THE_MEMORY * psutil.virtual_memory().available:
            trained = "the host's memory is too small to load it again"
    if isinstance(trained, str):
        print_once(f"The exported model was not compared with the trained one: {trained}.")
        return
    logits = logits_of(load_again(folder), trained.ids)
    columns = min(logits.shape[-1], trained.logits.shape[-1])  # a vocabulary may be padded
    expected = trained.logits[..., :columns]
    largest = (logits[..., :columns] - expected).abs().amax(-1)
    different = largest.flatten().quantile(POSITIONS).item()
    allowed = TOLERANCES[trained.dtype] * expected.abs().max().item()
    if not different <= allowed:
        raise CheckpointError(
            f"the exported model is not the trained one: its logits differ by {different:.2g}, allowed are"
            f" {allowed:.2g}. The last checkpoint has the trained weights: cpt export CHECKPOINT --output FOLDER"
        )


def load_again(folder: Path) -> PreTrainedModel:
    options: dict[str, Any] = {"trust_remote_code": True} if brings_its_code(folder) else {}
    architectures = AutoConfig.from_pretrained(folder, **options).architectures or ()
    kind: Any = AutoModelForCausalLM
    if any(name.endswith("ForSequenceClassification") for name in architectures):  # a reward model
        kind = AutoModelForSequenceClassification
    with without_zero3():
        model: PreTrainedModel = kind.from_pretrained(folder, dtype="auto", **options)
    return model
