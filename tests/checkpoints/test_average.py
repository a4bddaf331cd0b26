import pytest
import torch
from tiny_checkpoints import save_llama

from cpt.checkpoints.average import write_average
from cpt.checkpoints.model_folder import Tensors
from cpt.errors import CheckpointError


@pytest.fixture
def three(tokenizer_folder, tmp_path):
    return [save_llama(tmp_path / f"checkpoint-{seed}", tokenizer_folder, seed) for seed in (1, 2, 3)]


def test_each_weight_is_the_mean(three, tmp_path):
    write_average(three, tmp_path / "mean", dtype=None, max_shard_size="50KB")
    parts, mean = [Tensors(folder) for folder in three], Tensors(tmp_path / "mean")
    for name in mean.files:
        expected = torch.stack([part.read(name).double() for part in parts]).mean(dim=0).float()
        torch.testing.assert_close(mean.read(name), expected, rtol=0, atol=1e-9)


def test_models_of_other_shapes_are_refused(three, tokenizer_folder, tmp_path):
    wide = save_llama(tmp_path / "wide", tokenizer_folder, 4, intermediate_size=96)
    deep = save_llama(tmp_path / "deep", tokenizer_folder, 4, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"\[32, 64\].*\[32, 96\].*different shapes"):
        write_average([three[0], wide], tmp_path / "mean", dtype=None, max_shard_size="5GB")
    with pytest.raises(CheckpointError, match="different architectures"):
        write_average([three[0], deep], tmp_path / "mean", dtype=None, max_shard_size="5GB")


def test_one_model_has_no_mean_and_an_adapter_is_no_model(three, adapter_folder, tmp_path):
    with pytest.raises(CheckpointError, match="two checkpoints or more"):
        write_average(three[:1], tmp_path / "mean", dtype=None, max_shard_size="5GB")
    with pytest.raises(CheckpointError, match="is an adapter. Merge it first"):
        write_average([three[0], adapter_folder], tmp_path / "mean", dtype=None, max_shard_size="5GB")
    assert not (tmp_path / "mean").exists()
