"""A run is finished when its exported model is the trained one."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoints import random_llama
from torch import nn
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    TrainingArguments,
)

from cpt.errors import CheckpointError
from cpt.export.proof import TOLERANCES, logits_of
from cpt.export.proof_of_final import (
    TrainedLogits,
    check_final,
    dtype_of_arithmetic,
    trained_logits,
)


@pytest.fixture
def trained(base_folder, tmp_path):
    """`trained(model)`: a trainer with a model, and the logits that it must keep."""
    tokenizer = AutoTokenizer.from_pretrained(base_folder)

    def logits(model, parallelism=None, **changes):
        arguments = TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, **changes)
        arguments.parallelism_config = parallelism
        return trained_logits(SimpleNamespace(model=model, args=arguments), tokenizer)

    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_as_it_was_saved_is_accepted(trained, tmp_path, capsys, dtype):
    model = random_llama().to(dtype)
    model.save_pretrained(tmp_path / "final")
    check_final(tmp_path / "final", trained(model))
    assert "not compared" not in capsys.readouterr().out


def test_logits_that_are_all_zero_are_accepted(trained, tmp_path):
    model = random_llama()
    nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(tmp_path / "final")
    check_final(tmp_path / "final", trained(model))


def test_a_model_with_another_layer_or_config_is_refused(trained, tmp_path):
    model = random_llama()
    expected = trained(model)
    model.config.rope_parameters["rope_theta"] = 10.0
    model.save_pretrained(tmp_path / "config")
    with pytest.raises(CheckpointError, match="cpt export CHECKPOINT"):
        check_final(tmp_path / "config", expected)
    nn.init.normal_(model.model.layers[1].mlp.down_proj.weight)
    model.save_pretrained(tmp_path / "layer")
    with pytest.raises(CheckpointError):
        check_final(tmp_path / "layer", expected)


def test_not_a_number_is_refused(trained, tmp_path):
    model = random_llama()
    expected = trained(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path / "final")
    with pytest.raises(CheckpointError):
        check_final(tmp_path / "final", expected)


def test_what_cannot_be_compared_is_reported(trained, tmp_path, capsys, monkeypatch):
    model = random_llama()
    model.save_pretrained(tmp_path / "final")
    check_final(tmp_path / "final", trained(nn.Linear(1, 1)))
    monkeypatch.setattr("cpt.export.proof_of_final.MOST_OF_THE_MEMORY", 0)
    check_final(tmp_path / "final", trained(model))
    lines = capsys.readouterr().out.splitlines()
    assert [("Linear" in line, "memory" in line) for line in lines] == [
        (True, False),
        (False, True),
    ]


def test_the_tolerance_follows_from_the_dtype_of_the_arithmetic(trained):
    single, half = random_llama(), random_llama().half()
    some = random_llama()
    some.model.norm.bfloat16()
    on_gpu = SimpleNamespace(bf16=False, fp16=False, device=torch.device("cuda"))
    in_fp16 = SimpleNamespace(bf16=False, fp16=True, device=torch.device("cpu"))
    assert trained(single).dtype == torch.float32
    assert trained(half).dtype == torch.float16
    assert trained(single, bf16=True).dtype == trained(half, bf16=True).dtype == torch.bfloat16
    for arguments in (on_gpu, in_fp16):
        assert dtype_of_arithmetic(SimpleNamespace(args=arguments), single) == torch.float16
        assert dtype_of_arithmetic(SimpleNamespace(args=arguments), some) == torch.bfloat16


def test_what_shares_rows_or_was_quantized_is_not_compared(trained):
    model = random_llama()
    assert trained(model, SimpleNamespace(sp_size=2)) == "its processes share rows"
    alone = trained(model, SimpleNamespace(sp_size=1))
    assert torch.equal(alone.logits, logits_of(model, alone.ids)) and len(alone.ids) == 128
    model.is_quantized = True
    assert trained(model) == "its base was quantized for the training"


def test_nine_of_ten_positions_must_agree(tmp_path):
    model = random_llama(vocab_size=328)
    model.save_pretrained(tmp_path / "final")
    ids = list(range(100))
    logits = logits_of(model, ids)
    for wrong, is_refused in ((9, False), (12, True)):
        other = logits.clone()
        other[:wrong, 3] += 1
        for columns in (320, 328, 340):  # a vocabulary may be padded
            expected = torch.nn.functional.pad(other, (0, columns - 328), value=99)
            with pytest.raises(CheckpointError) if is_refused else nullcontext():
                check_final(tmp_path / "final", TrainedLogits(ids, expected, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_difference_up_to_the_tolerance_of_the_dtype_is_accepted(tmp_path, dtype):
    model = random_llama()
    model.save_pretrained(tmp_path / "final")
    logits = logits_of(model, [5, 6, 7])
    step = TOLERANCES[dtype] * logits.abs().max()
    largest = logits == logits.max()
    check_final(tmp_path / "final", TrainedLogits([5, 6, 7], logits + 0.9 * step * ~largest, dtype))
    with pytest.raises(CheckpointError, match="not the trained one"):
        other = logits + 1.1 * step * ~largest
        check_final(tmp_path / "final", TrainedLogits([5, 6, 7], other, dtype))


def test_a_reward_model_is_compared_by_its_score(trained, tmp_path):
    config = LlamaConfig(**{**random_llama().config.to_dict(), "num_labels": 1, "pad_token_id": 0})
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "final")
    expected = trained(model)
    assert expected.logits.shape == (1,)
    check_final(tmp_path / "final", expected)
    with torch.no_grad():
        model.score.weight.neg_()
    model.save_pretrained(tmp_path / "final")
    with pytest.raises(CheckpointError):
        check_final(tmp_path / "final", expected)
