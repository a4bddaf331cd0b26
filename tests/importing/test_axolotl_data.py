import pytest
from imported_configs import result

from cpt.errors import RecipeError


def sources(ledger):
    return ledger.recipe["data"]["sources"]


def one(make, **dataset):
    ledger = make(datasets=[{"path": "a/b", **dataset}])
    return sources(ledger)[0], result(ledger)


def test_texts(axolotl):
    source, found = one(
        axolotl, type="completion", field="body", split="test", name="en", revision="v1", data_files=["x.jsonl"]
    )
    assert source == {
        "path": "a/b",
        "subset": "en",
        "revision": "v1",
        "data_files": ["x.jsonl"],
        "split": "test",
        "text_column": "body",
    }
    assert {
        found[f"datasets[0].{key}"][0] for key in ("type", "field", "split", "name", "revision", "data_files")
    } == {"carried"}


def test_a_local_file_has_no_split(axolotl):
    ledger = axolotl(
        datasets=[{"path": "json", "data_files": ["x.jsonl", "y.jsonl"], "split": "train", "type": "completion"}]
    )
    assert sources(ledger) == [{"path": "x.jsonl"}, {"path": "y.jsonl"}]
    assert result(ledger)["datasets[0].split"] == ("otherwise", "a local file has none")


def test_a_part_of_a_split(axolotl):
    assert one(axolotl, type="completion", split="train[:100]")[0]["max_documents"] == 100
    source, found = one(axolotl, type="completion", split="train[:10%]")
    assert source["split"] == "train[:10%]" and found["datasets[0].split"] == ("carried", "data.sources[].split")
    ledger = axolotl(datasets=[{"path": "a/b", "type": "completion", "split": "train[:10%]"}], streaming=True)
    assert "split" not in sources(ledger)[0] and result(ledger)["datasets[0].split"][0] == "not"
    assert one(axolotl, path="here.jsonl", type="completion", split="train[:10%]")[1]["datasets[0].split"][0] == "not"


def test_a_dataset_may_be_its_path_alone(axolotl, loaded):
    ledger = axolotl(datasets=None, pretraining_dataset="a/b", test_datasets="c.jsonl")
    assert loaded(ledger).data.sources[0].path == "a/b" and loaded(ledger).evaluation.perplexity[0].path == "c.jsonl"
    found = result(ledger)
    assert (
        found["pretraining_dataset"] == ("carried", "data.sources[].path") and found["test_datasets"][0] == "carried"
    )


@pytest.mark.parametrize(
    ("dataset", "chat"),
    [
        ({"type": "chat_template"}, "messages"),
        ({"type": "sharegpt"}, "conversations"),
        (
            {"type": "chat_template", "field_messages": "talk", "field_tools": "tools"},
            {"messages": "talk", "tools": "tools"},
        ),
        ({"type": "metharme"}, {"prompt": "{prompt}", "completion": "generation"}),
        (
            {"type": {"field_instruction": "q", "field_output": "a", "format": "{instruction}:"}},
            {"prompt": "{q}:", "completion": "a"},
        ),
    ],
)
def test_examples(axolotl, loaded, dataset, chat):
    source, _ = one(axolotl, **dataset)
    assert source["chat"] == chat
    assert loaded(axolotl(datasets=[{"path": "a/b", **dataset}])).stage == "sft"


def test_messages_of_other_keys_are_told(axolotl):
    usual = one(axolotl, type="chat_template", message_property_mappings={"role": "from", "content": "value"})[1]
    assert usual["datasets[0].message_property_mappings"][0] == "otherwise"
    odd = one(axolotl, type="chat_template", message_property_mappings={"role": "who", "content": "said"})[1]
    assert odd["datasets[0].message_property_mappings"][0] == "not"


def test_roles_of_the_usual_names_are_read(axolotl):
    usual = {"user": ["human", "user"], "assistant": ["gpt"], "system": ["system"]}
    assert one(axolotl, type="chat_template", roles=usual)[1]["datasets[0].roles"] == ("otherwise", "read as they are")
    for roles in ({"assistant": ["narrator"]}, {"system": [["x"]]}, {"user": 3}, 3):
        assert one(axolotl, type="chat_template", roles=roles)[1]["datasets[0].roles"][0] == "not"


def test_what_cannot_be_said_of_a_dataset(axolotl):
    _, found = one(
        axolotl,
        type="input_output",
        shards=10,
        chat_template="x",
        roles_to_train=["user"],
        train_on_eos="all",
        typ=1,
        split=None,
    )
    assert "segments" in found["datasets[0].type"][1]
    assert {
        found[f"datasets[0].{key}"][0] for key in ("shards", "chat_template", "roles_to_train", "train_on_eos", "typ")
    } == {"not"}
    assert "Did you mean `type`?" in found["datasets[0].typ"][1] and found["datasets[0].split"] == (
        "carried",
        "empty there",
    )


def test_several_are_read_in_proportion(axolotl, loaded):
    ledger = axolotl(datasets=[{"path": "a/b", "type": "completion"}, {"path": "c/b", "type": "completion"}])
    assert loaded(ledger).data.temperature == 1 and [source.get("name") for source in sources(ledger)] == [None, "b-2"]


def test_what_is_held_out(axolotl, loaded):
    ledger = axolotl(val_set_size=0.05)
    assert loaded(ledger).evaluation.held_out_share == 0.05
    assert result(axolotl(val_set_size=100))["val_set_size"][0] == "not"
    ledger = axolotl(test_datasets=[{"path": "t.jsonl", "ds_type": "json", "type": "completion", "split": "train"}])
    assert loaded(ledger).evaluation.perplexity[0].path == "t.jsonl"


def test_pretraining_is_streamed(axolotl, loaded):
    ledger = axolotl(datasets=None, pretraining_dataset={"path": "a/b", "text_column": "content", "skip": 5})
    assert sources(ledger) == [{"path": "a/b", "text_column": "content", "streaming": True}]
    assert result(ledger)["pretraining_dataset[0].skip"][0] == "not" and loaded(ledger).stage == "cpt"


@pytest.mark.parametrize("datasets", [["a/b"], [{"type": "completion"}], 3, [{"path": 1}], [{"path": " "}]])
def test_what_is_no_list_of_datasets(axolotl, datasets):
    with pytest.raises(
        RecipeError, match=r"config.yml:2: `datasets`: expected a list of datasets, each with a `path`"
    ):
        axolotl(datasets=datasets)


def test_a_run_reads_something(axolotl):
    with pytest.raises(RecipeError, match="it names no dataset"):
        axolotl(datasets=None)
