from run_folders import write_run

from cpt.compare.inputs import MOST_FILES, data_topic, model_topic, same_anyway, short_paths
from cpt.compare.record import read_record


def records(tmp_path, *plants):
    folders = [
        write_run(tmp_path / f"run{number}", *([plant] if plant else [])) for number, plant in enumerate(plants)
    ]
    return [read_record(folder, folder.name) for folder in folders]


def files(**hashes):
    def plant(inputs, **others):
        inputs["data"]["sources"]["domain"]["files"] = {f"/x/{name}": value for name, value in hashes.items()}

    return plant


def rows(topic):
    return {row.name: row.values for row in topic.rows}


def test_the_file_that_differs_is_named(tmp_path):
    found = data_topic(records(tmp_path, files(a="1", b="2", c="3"), files(a="1", b="9")), recipes_differ=False)
    assert rows(found) == {"domain: b": ("2", "9"), "domain: c": ("3", "not there")}


def test_the_same_content_under_another_name_is_no_difference(tmp_path):
    assert rows(data_topic(records(tmp_path, files(a="1", b="2"), files(c="2", d="1")), recipes_differ=False)) == {}


def test_of_very_many_files_the_others_are_counted(tmp_path):
    first = files(**{f"f{number:03}": f"a{number}" for number in range(50)})
    second = files(**{f"f{number:03}": f"b{number}" for number in range(50)})
    found = rows(data_topic(records(tmp_path, first, second), recipes_differ=False))
    assert len(found) == MOST_FILES + 1 and "domain: 30 more files differ" in found


def test_counts_are_told_only_where_nothing_explains_them(tmp_path):
    def fewer(inputs, **others):
        inputs["data"]["sources"]["domain"]["documents"] = 9

    runs = records(tmp_path, None, fewer)
    assert rows(data_topic(runs, recipes_differ=False)) == {"domain: documents": ("10", "9")}
    assert rows(data_topic(runs, recipes_differ=True)) == {}


def test_another_fingerprint_alone_is_told(tmp_path):
    runs = records(tmp_path, None, lambda inputs, **others: inputs["data"].update(fingerprint="f9"))
    assert rows(data_topic(runs, recipes_differ=False)) == {"fingerprint": ("f0", "f9")}


def test_weights_are_told_by_file(tmp_path):
    def other(inputs, **others):
        inputs["weights"]["sha256"] = {"model.safetensors": "changed"}

    assert rows(model_topic(records(tmp_path, None, other))) == {
        "weights model.safetensors": ("weights-hash", "changed")
    }


def test_a_path_to_the_same_content_means_the_same(tmp_path):
    same = same_anyway(records(tmp_path, None, None))
    assert {("model", "path"), ("tokenizer", "path"), ("data", "sources", "[domain]", "path")} <= same

    def other(inputs, **others):
        inputs["weights"]["sha256"] = {"model.safetensors": "changed"}

    assert ("model", "path") not in same_anyway(records(tmp_path / "others", None, other))


def test_paths_are_as_short_as_they_can_be_told_apart():
    assert short_paths({"/a/x/1": "h", "/a/y/1": "i"}) == {"x/1": "h", "y/1": "i"} and short_paths({}) == {}
    assert short_paths({"/a/x/1": "h"}) == {"1": "h"}
