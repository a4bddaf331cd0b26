"""A folder of weights: what it holds, its tensors, and its pickles as data."""

import json
import os
import shutil
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny import Planted
from tiny_checkpoints import save_llama
from torch.serialization import default_restore_location
from transformers import AutoModelForCausalLM

from cpt.checkpoints.model_folder import (
    HARMLESS,
    Tensors,
    config_json,
    harmless_classes,
    kind_of,
    know_indexed_cpu,
    load_data,
    only_data,
    weight_files,
    write_tensors,
)
from cpt.checkpoints.sharding import consolidated_state, make_universal
from cpt.errors import CheckpointError


@pytest.fixture(scope="module")
def model_folder(tokenizer_folder, tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("model") / "llama", tokenizer_folder, seed=1)


@pytest.fixture(scope="module")
def in_shards(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(
        folder, max_shard_size="50KB"
    )
    return folder


def test_a_folder_is_known_by_its_files(model_folder, in_shards, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    (tmp_path / "zero" / "global_step3").mkdir(parents=True)
    (tmp_path / "zero" / "latest").write_text("global_step3")
    (tmp_path / "zero" / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    folders = (model_folder, in_shards, tmp_path / "adapter", tmp_path / "zero", tmp_path)
    assert [kind_of(folder) for folder in folders] == [
        "model",
        "model",
        "adapter",
        "zero",
        "nothing",
    ]


def test_tensors_are_the_same_from_one_file_from_shards_and_from_a_pickle(
    model_folder, in_shards, tmp_path
):
    whole = Tensors(model_folder)
    torch.save({name: whole.read(name) for name in whole.files}, tmp_path / "pytorch_model.bin")
    assert len(set(Tensors(in_shards).files.values())) > 1
    for other in (Tensors(in_shards), Tensors(tmp_path)):
        assert other.shapes == whole.shapes and other.dtypes == whole.dtypes
        assert all(torch.equal(whole.read(name), other.read(name)) for name in whole.files)


def test_damaged_weights_and_configs_are_named(model_folder, tmp_path):
    cut = shutil.copytree(model_folder, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        Tensors(cut)
    for content in (b'{"model_type": "lla', b"\xff\xfe\xb8", b"[1, 2]"):
        (cut / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match="config.json"):
            config_json(cut)


def test_every_tensor_is_computed_once_and_no_file_is_larger_than_requested(tmp_path):
    tensors = {f"layer.{number}": torch.full((64, 64), float(number)) for number in range(8)}
    shapes, computed = dict.fromkeys(tensors, ((64, 64), torch.bfloat16)), []
    write_tensors(tmp_path, shapes, lambda name: computed.append(name) or tensors[name], "20KB")
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 4 and all(file.stat().st_size < 21_000 for file in files)
    written = Tensors(tmp_path)
    assert sorted(computed) == sorted(tensors) and set(written.dtypes.values()) == {torch.bfloat16}
    assert all(torch.equal(written.read(name).float(), tensor) for name, tensor in tensors.items())


def test_a_folder_in_shards_has_an_index_and_mixed_dtypes_and_a_number_keep_theirs(tmp_path):
    dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float16, "d": torch.int64}
    shapes = {name: ((5, 3) if name != "d" else (), dtype) for name, dtype in dtypes.items()}

    def compute(name):
        return torch.full((3, 5), 2.0).t() if name != "d" else torch.tensor(7.0)

    write_tensors(tmp_path, shapes, compute, max_shard_size=60)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 60 + 30 + 30 + 8
    found = Tensors(tmp_path)
    assert found.dtypes == dtypes and found.shapes == {name: s for name, (s, _) in shapes.items()}
    assert index["weight_map"] == {name: file.name for name, file in found.files.items()}
    assert all(torch.equal(found.read(name).float(), compute(name)) for name in dtypes)
    with safe_open(next(iter(found.files.values())), framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    (tmp_path / index["weight_map"]["b"]).unlink()
    with pytest.raises(CheckpointError, match=f"lists missing files: {index['weight_map']['b']}. "):
        weight_files(tmp_path)
    (tmp_path / "below").mkdir()
    with pytest.raises(CheckpointError, match="has no weights, expected one of model.safetensors"):
        weight_files(tmp_path / "below")
    write_tensors(tmp_path / "below", shapes, compute)
    assert [path.name for path in (tmp_path / "below").iterdir()] == ["model.safetensors"]


# --- pickles ---------------------------------------------------------------------------------------------------------


MODEL_STATES = "global_step3/mp_rank_00_model_states.pt"


@pytest.fixture
def planted(tmp_path):
    """A checkpoint of ZeRO's parts in which each pickle would make the folder `ran`."""
    parts = tmp_path / "checkpoint-3" / "global_step3"
    parts.mkdir(parents=True)
    (parts.parent / "latest").write_text("global_step3")
    content = {
        "module": {},
        "optimizer_state_dict": {"zero_stage": 2},
        "x": Planted(tmp_path / "ran"),
    }
    for name in ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save(content, parts / name)
    return parts.parent


def load_all(checkpoint):
    """As DeepSpeed loads."""
    with only_data(checkpoint):
        torch.load(checkpoint / MODEL_STATES, weights_only=False)


READERS = {
    "a file": lambda checkpoint: load_data(checkpoint / MODEL_STATES),
    "a reader that allows code": load_all,
    "the parts together": consolidated_state,
    "for other processes": lambda checkpoint: make_universal(checkpoint, checkpoint.parent),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_planted_pickle_is_refused_by_name_and_never_runs(planted, reader):
    with pytest.raises(CheckpointError, match="posix.mkdir"):
        READERS[reader](planted)
    assert list(planted.parent.iterdir()) == [planted]


def test_the_pickles_of_a_trusted_checkpoint_may_run(planted):
    with only_data(planted, trust=True):
        load_data(planted / MODEL_STATES)
    assert (planted.parent / "ran").exists()
    (planted.parent / "ran").rmdir()
    load_data(planted / MODEL_STATES, trust=True)
    assert (planted.parent / "ran").exists()


def test_torchs_settings_are_left_as_they_were_and_do_not_open_a_file(planted, monkeypatch):
    settings = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    for name in settings:
        monkeypatch.delenv(name, raising=False)
    for name in settings:
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            before = dict(os.environ)
            with pytest.raises(CheckpointError, match="would call posix.mkdir. It was not read"):
                load_data(planted / MODEL_STATES)
            assert dict(os.environ) == before
    cut = planted / "cut.pt"
    cut.write_bytes(b"\x80\x04nonsense")
    with pytest.raises(CheckpointError, match=r"cut.pt: a file is damaged: "):
        load_data(cut)


def test_random_states_of_numpy_are_data(tmp_path):
    torch.save({"numpy": np.random.get_state(), "t": torch.ones(2)}, tmp_path / "rng.pth")
    read = load_data(tmp_path / "rng.pth")
    assert read["numpy"][0] == "MT19937" and read["numpy"][1].shape == (624,)


def test_classes_of_deepspeed_are_data_only_in_a_process_that_uses_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    arrays = harmless_classes()
    assert np.ndarray in arrays and np.dtype in arrays and len(arrays) == 4
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    classes = []
    for module, names in HARMLESS.items():
        standing_in = ModuleType(module)
        for name in names:
            classes.append(type(name, (), {}))
            setattr(standing_in, name, classes[-1])
        monkeypatch.setitem(sys.modules, module, standing_in)
    assert harmless_classes()[4:] == classes and len(classes) == 4


def test_an_indexed_cpu_is_the_cpu_and_other_devices_are_left_to_torch(tmp_path):
    know_indexed_cpu()
    storage = torch.ones(3).untyped_storage()
    assert default_restore_location(storage, "cpu:0") is storage
    assert default_restore_location(storage, "meta").device == torch.device("meta")
    torch.save({"a": torch.arange(3.0)}, tmp_path / "a.pt")
    read = load_data(tmp_path / "a.pt", map_location="cpu:0")["a"]
    assert read.tolist() == [0, 1, 2] and read.device == torch.device("cpu")
