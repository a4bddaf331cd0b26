from transformers import AutoModelForCausalLM

from benchmarks.gpu.cases import CASES, tiny
from benchmarks.gpu.initial import WEIGHTS, write_initial


def test_cases_of_one_shape_share_their_weights(tmp_path):
    for name in "CDE":
        (tmp_path / name).mkdir()
    write_initial({name: tiny(CASES[name]) for name in "CDE"}, tmp_path)
    assert (tmp_path / "D" / WEIGHTS).is_symlink() and not (tmp_path / "E" / WEIGHTS).is_symlink()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "D" / WEIGHTS)
    assert model.config.tie_word_embeddings and model.config.hidden_size == 32
