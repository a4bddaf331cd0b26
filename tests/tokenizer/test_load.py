import logging

import pytest
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from cpt.errors import RecipeError, ResourceError
from cpt.recipe.schema import Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer
from cpt.tokenizer.train_bpe import train_bpe, untrained_tokenizer

TEXT = ["some words to merge, and some more words\n"] * 5


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def folder(tmp_path):
    train_bpe(TEXT, 265, tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def load(tokenizer=None, model=None):
    return load_tokenizer(Tokenizer(path=tokenizer and str(tokenizer)), Model(path=model and str(model)))


def test_the_path_is_the_models_by_default(folder):
    assert len(load(model=folder)) == 265


def test_its_own_path_comes_before_the_models(folder):
    assert len(load(tokenizer=folder, model="/nowhere")) == 265


def test_a_missing_pad_token_becomes_eos_and_nothing_is_added(tmp_path, caplog):
    bare = untrained_tokenizer()
    bare.add_special_tokens(["<eos>"])
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<eos>").save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        loaded = load(tmp_path)
    assert loaded.pad_token == "<eos>"
    assert len(loaded) == 1
    assert "no pad token" in caplog.text


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=untrained_tokenizer()).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="no eos token"):
        load(tmp_path)


def test_no_path_at_all_is_refused():
    with pytest.raises(RecipeError, match="Set `tokenizer.path`"):
        load()


@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "a/b/c"])
def test_a_path_that_leads_nowhere_is_refused(path):
    with pytest.raises(RecipeError, match=r"Check `tokenizer\.path`"):
        load(path)


@pytest.mark.parametrize("path", ["no_such_tokenizer", "nobody/nothing"])
def test_what_the_hub_cannot_give_now_is_refused(path):
    with pytest.raises(ResourceError, match=r"`tokenizer\.path`.*the Hub cannot be reached"):
        load(path)


def test_a_file_a_folder_without_tokenizer_and_a_damaged_one_are_told_apart(tmp_path, folder):
    with pytest.raises(RecipeError, match="is a file"):
        load(folder / "tokenizer.json")
    with pytest.raises(RecipeError, match="holds no tokenizer"):
        load(tmp_path)
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole[:500])
    with pytest.raises(RecipeError, match="is damaged"):
        load(folder)


def test_a_tokenizer_without_fast_version_is_refused(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="no fast tokenizer"):
        load(tmp_path)


def test_the_users_module_is_imported_first_because_the_models_config_is_read_too(folder):
    with pytest.raises(RecipeError, match="cannot import `nobodys_family`"):
        load_tokenizer(
            Tokenizer(path=str(folder)), Model.model_validate({"import": "nobodys_family", "path": str(folder)})
        )
