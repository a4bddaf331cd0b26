import logging

import pytest
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from cpt.contrib.tokenizers.train_bpe import untrained_tokenizer
from cpt.errors import RecipeError, ResourceError
from cpt.recipe.schema import Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer


def load(tokenizer=None, **model):
    return load_tokenizer(Tokenizer(path=tokenizer and str(tokenizer)), Model.model_validate(model))


def test_the_path_is_the_models_by_default_and_its_own_comes_before(tokenizer_folder):
    assert (
        len(load(path=str(tokenizer_folder))) == len(load(tokenizer_folder, path="/nowhere")) == 320
    )


def test_a_missing_pad_token_becomes_eos_and_nothing_is_added(tmp_path, caplog):
    bare = untrained_tokenizer()
    bare.add_special_tokens(["<eos>"])
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<eos>").save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        loaded = load(tmp_path)
    assert (loaded.pad_token, len(loaded)) == ("<eos>", 1) and "pad token" in caplog.text


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=untrained_tokenizer()).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="eos"):
        load(tmp_path)


@pytest.mark.parametrize("path", [None, "/no/such/folder", "./missing", "a/b/c"])
def test_a_path_that_leads_nowhere_is_refused(path):
    with pytest.raises(RecipeError, match=r"tokenizer\.path"):
        load(path)


@pytest.mark.parametrize("path", ["no_such_tokenizer", "nobody/nothing"])
def test_what_the_hub_cannot_give_now_is_refused(path):
    with pytest.raises(ResourceError, match=r"`tokenizer\.path`.*Hub"):
        load(path)


def test_a_file_a_folder_without_tokenizer_and_a_damaged_one_are_told_apart(
    tmp_path, tokenizer_folder
):
    with pytest.raises(RecipeError, match="is a file"):
        load(tokenizer_folder / "tokenizer.json")
    with pytest.raises(RecipeError, match="no tokenizer"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(
        (tokenizer_folder / "tokenizer.json").read_bytes()[:500]
    )
    with pytest.raises(RecipeError, match="damaged"):
        load(tmp_path)


def test_a_tokenizer_without_fast_version_is_refused(tmp_path):
    ByT5Tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="fast"):
        load(tmp_path)


def test_the_users_module_is_imported_first_because_the_models_config_is_read_too(tokenizer_folder):
    with pytest.raises(RecipeError, match="nobodys_family"):
        load(tokenizer_folder, **{"import": "nobodys_family", "path": str(tokenizer_folder)})
