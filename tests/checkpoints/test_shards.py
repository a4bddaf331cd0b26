import torch

from cpt.checkpoints.model_folder import Tensors, write_tensors

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


def test_what_fits_into_one_file_has_no_index(tmp_path):
    write_tensors(tmp_path, SHAPES, CONTENT.__getitem__, "5GB")
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
