"""Continued pre-training: next-token loss on packed documents, from trained weights."""

from transformers import TrainingArguments

from cpt.stages.trainer import CPTTrainer, builder

CONFIG = TrainingArguments
COLUMNS = ("text",)


build_trainer = builder(CPTTrainer)
