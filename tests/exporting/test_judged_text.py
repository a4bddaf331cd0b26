import pytest
from tiny import TINY_LLAMA, write_documents
from transformers import AutoTokenizer, LlamaConfig

from cpt.errors import DataError
from cpt.exporting.judged_text import MOST_TOKENS, judged_text
from cpt.recipe.schema import Recipe

CONFIG = LlamaConfig(**{key: value for key, value in TINY_LLAMA.items() if key != "model_type"})


@pytest.fixture
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def test_a_run_is_judged_on_its_own_held_out_files(tiny_recipe, tokenizer, tmp_path):
    for number, name in enumerate(("domain", "general")):
        write_documents(tmp_path / f"{name}.jsonl", 5, seed=number)
    sets = [{"path": str(tmp_path / f"{name}.jsonl"), "name": name} for name in ("domain", "general")]
    text = judged_text(Recipe.model_validate(tiny_recipe | {"evaluation": {"perplexity": sets}}), tokenizer, CONFIG, None)
    assert "held-out documents of the run `tiny`" in text.where and len(text.windows) >= 10
    whole = "".join((tmp_path / f"{name}.jsonl").read_text() for name in ("domain", "general"))
    assert tokenizer.decode(text.windows[0][:8]) in whole


def test_without_held_out_files_it_is_our_passage_and_said_so(tiny_recipe, tokenizer, tmp_path):
    gone = {"evaluation": {"perplexity": [{"path": str(tmp_path / "gone.jsonl"), "name": "gone"}]}}
    for recipe in (None, Recipe.model_validate(tiny_recipe), Recipe.model_validate(tiny_recipe | gone)):
        assert "our own passage" in judged_text(recipe, tokenizer, CONFIG, None).where


def test_the_users_file_comes_before_all(tiny_recipe, tokenizer, tmp_path):
    file = tmp_path / "page.txt"
    file.write_text("the model reads a document " * 20)
    text = judged_text(Recipe.model_validate(tiny_recipe), tokenizer, CONFIG, file)
    assert text.where == f"the text of {file}" and text.num_bytes == pytest.approx(len(file.read_text()), abs=30)


def test_windows_are_as_long_as_the_model_reads_and_not_endless(tokenizer, tmp_path):
    file = tmp_path / "page.txt"
    file.write_text("the model reads a document " * 500)
    text = judged_text(None, tokenizer, CONFIG, file)
    assert max(map(len, text.windows)) <= CONFIG.max_position_embeddings and text.num_predicted < MOST_TOKENS


def test_a_file_of_one_token_or_none_is_refused(tokenizer, tmp_path):
    (tmp_path / "short.txt").write_text("a")
    for name, message in (("short.txt", "fewer than two tokens"), ("gone.txt", "cannot be read")):
        with pytest.raises(DataError, match=message):
            judged_text(None, tokenizer, CONFIG, tmp_path / name)
