import json

import pytest
from tiny import write_recipe

from cpt.errors import DataError
from cpt.evaluation.sets import data_of_recipe, data_of_texts, open_evaluation_sets
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Model, Tokenizer
from cpt.tokenizer.load import load_tokenizer


@pytest.fixture
def tokenizer(tokenizer_folder):
    return load_tokenizer(Tokenizer(path=str(tokenizer_folder)), Model(path="unused"))


def test_texts_are_the_documents_of_the_rows_in_order(corpus, tokenizer):
    opened = open_evaluation_sets(data_of_texts([f"held={corpus / 'held_out.jsonl'}"], 64), tokenizer)["held"]
    texts = list(opened.texts())
    assert [one.text for one in texts] == [
        json.loads(line)["text"] for line in (corpus / "held_out.jsonl").read_text().splitlines()
    ]
    assert texts[2].where == f"{corpus / 'held_out.jsonl'}:3" and opened.rows.num_documents == 12


def test_a_recipes_sets_are_its_files_and_the_shares_of_its_sources(corpus, tiny_recipe, tokenizer, tmp_path):
    tiny_recipe["evaluation"] = {
        "held_out_share": 0.2,
        "perplexity": [{"path": str(corpus / "held_out.jsonl"), "name": "further"}],
    }
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    opened = open_evaluation_sets(data_of_recipe(recipe), tokenizer)
    assert set(opened) == {"domain", "general", "further"}
    for of_set in opened.values():
        assert len(list(of_set.texts())) == of_set.rows.num_documents > 5


@pytest.mark.parametrize("text", ["corpus.jsonl", "=x", "domain="])
def test_a_set_without_name_or_path_is_refused(text):
    with pytest.raises(DataError, match="write it as name=path"):
        data_of_texts([text])


def test_two_sets_of_one_name_are_refused(corpus, tokenizer):
    with pytest.raises(DataError, match="two held-out sets are called `a`"):
        open_evaluation_sets(
            data_of_texts([f"a={corpus / 'held_out.jsonl'}", f"a={corpus / 'domain.jsonl'}"], 64), tokenizer
        )
