from transformers import TrainingArguments

from cpt.stages import cpt, pretrain


def test_the_stage_reads_rows_that_keep_documents_apart():
    assert cpt.COLUMNS == ("text",) and cpt.CONFIG is TrainingArguments


def test_pre_training_is_the_same_loop():
    assert pretrain.build_trainer is cpt.build_trainer
