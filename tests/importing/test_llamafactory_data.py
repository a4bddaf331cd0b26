import json

import pytest
from imported_configs import result

from cpt.errors import RecipeError


@pytest.fixture
def sources(llamafactory, tmp_path, monkeypatch):
    """The sources of a config whose dataset_info.json has one dataset, `d`."""
    monkeypatch.chdir(tmp_path)

    def make(entry, stage="sft", **values):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"d": entry}))
        ledger = llamafactory(stage=stage, dataset="d", dataset_dir="data", **values)
        return ledger.recipe["data"]["sources"][0], ledger

    return make


@pytest.mark.parametrize(
    ("entry", "stage", "form"),
    [
        ({}, "sft", {"chat": {"user": "{instruction}\n{input}", "assistant": "output"}}),
        (
            {"columns": {"prompt": "q", "response": "a", "system": "s", "history": "h"}},
            "sft",
            {"chat": {"user": "q", "assistant": "a", "system": "s", "history": "h"}},
        ),
        (
            {"columns": {"prompt": "q", "chosen": "c", "rejected": "r"}, "ranking": True},
            "dpo",
            {"chat": {"user": "q", "chosen": "c", "rejected": "r"}},
        ),
        (
            {"columns": {"prompt": "q", "response": "a", "kto_tag": "k"}},
            "kto",
            {"chat": {"user": "q", "assistant": "a", "label": "k"}},
        ),
        ({"formatting": "sharegpt"}, "sft", {"chat": {"messages": "conversations"}}),
        (
            {"formatting": "sharegpt", "columns": {"messages": "m", "tools": "t"}},
            "sft",
            {"chat": {"messages": "m", "tools": "t"}},
        ),
        (
            {"formatting": "sharegpt", "ranking": True},
            "rm",
            {"chat": {"prompt": "conversations", "chosen": "chosen", "rejected": "rejected"}},
        ),
        (
            {"formatting": "sharegpt", "columns": {"messages": "m", "kto_tag": "k"}},
            "kto",
            {"chat": {"messages": "m", "label": "k"}},
        ),
        ({"formatting": "sharegpt", "columns": {"messages": "m"}}, "ppo", {"chat": {"prompt": "m"}}),
        ({"columns": {"prompt": "text"}}, "pt", {}),
        ({"columns": {"prompt": "body"}}, "pt", {"text_column": "body"}),
        ({"columns": {"prompt": "text"}, "file_name": "d.txt"}, "pt", {"text_documents": "line"}),
    ],
)
def test_what_a_row_is(sources, loaded, entry, stage, form):
    source, ledger = sources({"file_name": "d.json", **entry}, stage, reward_model="saves/rm")
    assert source == {"path": f"data/{entry.get('file_name', 'd.json')}", "name": "d", **form}
    loaded(ledger)


def test_a_dataset_of_the_hub(sources, loaded):
    entry = {"hf_hub_url": "owner/set", "subset": "en", "split": "test", "folder": "part", "num_samples": 9}
    source, ledger = sources(entry, streaming=True)
    del source["chat"]
    assert source == {
        "path": "owner/set",
        "name": "d",
        "subset": "en",
        "split": "test",
        "data_files": ["part/**"],
        "streaming": True,
        "max_documents": 9,
    }
    loaded(ledger)


def test_what_of_a_dataset_is_not_carried_over(sources):
    columns = {"messages": "m", "images": "i"}
    _, ledger = sources(
        {"ms_hub_url": "a/b", "formatting": "sharegpt", "columns": columns, "tags": {"role_tag": "who"}}, max_samples=5
    )
    found = result(ledger)
    assert {key for key, (verdict, _) in found.items() if verdict == "not"} == {
        "dataset_info.json: d.ms_hub_url",
        "dataset_info.json: d.columns.images",
        "dataset_info.json: d.tags",
    }
    assert ledger.recipe["data"]["sources"][0]["max_documents"] == 5


@pytest.mark.parametrize("number", ["x", -1, 1.5])
def test_a_number_of_rows_that_is_none_is_told(sources, loaded, number):
    source, ledger = sources({"file_name": "d.json", "num_samples": number})
    assert "max_documents" not in source and "all are read" in result(ledger)["dataset_info.json: d.num_samples"][1]
    loaded(ledger)


def test_names_that_are_nowhere(llamafactory, sources):
    _, ledger = sources({"file_name": "d.json"})
    ledger = llamafactory(dataset="d,dd", dataset_dir="data")
    assert (
        "Did you mean `d`?" in result(ledger)["dataset"][1]
        and ledger.recipe["data"]["sources"][1]["path"] == "data/dd.json"
    )
    assert (
        "there is no nowhere/dataset_info.json from here. The"
        in result(llamafactory(dataset_dir="nowhere"))["dataset"][1]
    )
    assert (
        "`hf download lab/sets --repo-type dataset"
        in result(llamafactory(dataset_dir="REMOTE:lab/sets"))["dataset"][1]
    )


def test_a_mixture_and_what_is_held_out(llamafactory, loaded):
    ledger = llamafactory(
        dataset="a/b,c/d", interleave_probs="0.7,0.3", mix_strategy="interleave_under", eval_dataset="e/f"
    )
    recipe = loaded(ledger)
    assert [source.weight for source in recipe.data.sources] == [0.7, 0.3] and recipe.evaluation.perplexity[
        0
    ].path == "e/f"
    assert loaded(llamafactory(dataset="a/b,c/d")).data.temperature == 1
    assert result(llamafactory(dataset="a/b,c/d", interleave_probs="1"))["interleave_probs"][0] == "not"
    assert loaded(llamafactory(val_size=0.1)).evaluation.held_out_share == 0.1
    assert result(llamafactory(val_size=100))["val_size"][0] == "not"


@pytest.mark.parametrize(("text", "said"), [("{", "cannot be read as JSON"), ("[]", "expected an object")])
def test_a_dataset_info_that_is_none(llamafactory, tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dataset_info.json").write_text(text)
    with pytest.raises(RecipeError, match=said):
        llamafactory(dataset_dir=".")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "names no `dataset` to train on$"),
        ({"export_dir": "out"}, "It is a config that writes a model: `cpt merge`"),
        ({"infer_backend": "huggingface"}, "talks to a model: `cpt chat`"),
        ({"eval_dataset": "x", "do_predict": True}, "judges a model: `cpt evaluate`"),
    ],
)
def test_a_run_reads_something(llamafactory, values, said):
    with pytest.raises(RecipeError, match=said):
        llamafactory(dataset=None, **values)
