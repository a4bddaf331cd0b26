"""The stranger's program: what it refuses; what it reads right is in test_gguf_families.py."""

import subprocess
import sys

import pytest
from tiny_gguf import read_back, tiny_model, written
from transformers import AutoTokenizer

from cpt.exporting import reload_gguf
from cpt.exporting.gguf_file import own_tensors
from cpt.exporting.reload_gguf import logits_of_file

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def file_and_text(tokenizer_folder, tmp_path_factory):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return file, written(tiny_model("qwen3", tokenizer), tokenizer, file)


def test_it_gives_logits_for_each_token_of_the_text(file_and_text):
    file, text = file_and_text
    logits = read_back(file, text)
    assert logits.shape[0] == len(text.ids) and logits.isfinite().all()


def test_other_tokens_are_refused(file_and_text):
    file, text = file_and_text
    job = {"text": text.text, "tokens": len(text.ids), "ids": [*text.ids[:-1], 0]}
    with pytest.raises(SystemExit, match="the file's tokenizer gives other tokens"):
        logits_of_file(str(file.parent), file.name, job)


def test_a_tensor_that_is_lacking_is_named(tokenizer_folder, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    model = tiny_model("qwen3", tokenizer)
    whole = list(own_tensors(model))
    monkeypatch.setattr(
        "cpt.exporting.gguf_file.own_tensors",
        lambda model: [one for one in whole if "layers.1.mlp.up_proj" not in one[0]],
    )
    text = written(model, tokenizer, tmp_path / "tiny.gguf")
    with pytest.raises(SystemExit, match=r"missing \['model.layers.1.mlp.up_proj.weight'\]"):
        read_back(tmp_path / "tiny.gguf", text)


def test_this_package_is_out_of_its_reach(tmp_path):
    (tmp_path / "job.json").write_text("{}")
    program = (
        f"import runpy, sys\nsys.argv = ['reload', {str(tmp_path / 'job.json')!r}]\n"
        + f"try:\n    runpy.run_path({reload_gguf.__file__!r}, run_name='__main__')\nexcept KeyError:\n   "
        " pass\nimport cpt\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1 and "import of cpt halted" in ended.stderr
