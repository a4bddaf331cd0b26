import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from cpt.checkpoints.model_folder import Tensors, config_json, kind_of, write_tensors
from cpt.errors import CheckpointError


@pytest.fixture
def sharded(base_folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(base_folder).save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    return tmp_path / "sharded"


def test_a_folder_is_known_by_its_files(base_folder, adapter_folder, sharded, tmp_path):
    (tmp_path / "zero" / "global_step3").mkdir(parents=True)
    (tmp_path / "zero" / "latest").write_text("global_step3")
    (tmp_path / "zero" / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    kinds = [kind_of(folder) for folder in (base_folder, sharded, adapter_folder, tmp_path / "zero", tmp_path)]
    assert kinds == ["model", "model", "adapter", "zero", "nothing"]


def test_tensors_of_shards_are_those_of_the_model(base_folder, sharded):
    whole, parts = Tensors(base_folder), Tensors(sharded)
    assert len(set(parts.files.values())) > 1 and whole.shapes == parts.shapes and whole.dtypes == parts.dtypes
    assert all(torch.equal(whole.read(name), parts.read(name)) for name in whole.files)


def test_pickled_weights_are_read_too(base_folder, tmp_path):
    whole = Tensors(base_folder)
    torch.save({name: whole.read(name) for name in whole.files}, tmp_path / "pytorch_model.bin")
    pickled = Tensors(tmp_path)
    assert pickled.shapes == whole.shapes and all(
        torch.equal(whole.read(name), pickled.read(name)) for name in whole.files
    )


def test_a_file_cut_short_is_named(base_folder, tmp_path):
    shutil.copytree(base_folder, tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors is damaged"):
        Tensors(tmp_path / "cut")


@pytest.mark.parametrize("content", [b'{"model_type": "lla', b"\xff\xfe\xb8", b"[1, 2]"])
def test_a_damaged_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config.json (is damaged|holds no JSON object).* Copy it again"):
        config_json(tmp_path)


CONTENT = {f"layer.{number}": torch.full((64, 64), float(number)) for number in range(8)}
SHAPES = {name: (tuple(tensor.shape), torch.bfloat16) for name, tensor in CONTENT.items()}


def test_every_tensor_is_computed_once_and_no_file_is_larger_than_asked(tmp_path):
    asked = []
    write_tensors(tmp_path, SHAPES, lambda name: asked.append(name) or CONTENT[name], "20KB")
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 4 and all(file.stat().st_size < 21_000 for file in files) and sorted(asked) == sorted(CONTENT)
    written = Tensors(tmp_path)
    assert set(written.dtypes.values()) == {torch.bfloat16}
    assert all(torch.equal(written.read(name).float(), tensor) for name, tensor in CONTENT.items())
