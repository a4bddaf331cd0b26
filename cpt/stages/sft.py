"""Supervised fine-tuning: next-token loss on the assistant's words alone; the loop is that of continued
pre-training."""

from transformers import TrainingArguments

from cpt.stages.cpt import build_trainer

CONFIG = TrainingArguments
COLUMNS = ("messages",)

__all__ = ["COLUMNS", "CONFIG", "build_trainer"]
