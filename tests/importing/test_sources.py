import pytest

from cpt.importing.sources import is_on_the_hub, places_of, split_of, with_names


def test_a_dataset_is_on_the_hub_if_it_is_not_here_and_called_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "set").mkdir()
    assert (
        is_on_the_hub("owner/set")
        and not is_on_the_hub("here/set")
        and not is_on_the_hub("a.jsonl")
        and not is_on_the_hub("./a/b")
    )


@pytest.mark.parametrize(
    ("path", "files", "found"),
    [
        ("owner/set", None, (["owner/set"], [])),
        ("owner/set", "a.jsonl", (["owner/set"], ["a.jsonl"])),
        ("json", ["a.jsonl", "b.jsonl"], (["a.jsonl", "b.jsonl"], [])),
        ("a.jsonl", None, (["a.jsonl"], [])),
    ],
)
def test_places(path, files, found):
    assert places_of(path, files) == found


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("train", ("train", None, "")),
        ("train_sft[:100]", ("train_sft", 100, "")),
        ("train[:20%]", ("train", None, "train[:20%]")),
        ("train[10:20]", ("train", None, "train[10:20]")),
        ("train+test", ("train", None, "train+test")),
    ],
)
def test_splits(written, found):
    assert split_of(written) == found


def test_sources_that_reports_could_not_tell_apart_get_names():
    taken = {"b"}
    named = with_names([{"path": "a/b.jsonl"}, {"path": "x", "weight": 1}, {"path": "c/b"}], taken)
    assert named == [{"path": "a/b.jsonl", "name": "b-2"}, {"path": "x", "weight": 1}, {"path": "c/b", "name": "b-3"}]


def test_shares_follow_from_sizes_where_they_are_known(llamafactory):
    assert llamafactory(dataset="a/b,c/d").recipe["data"]["temperature"] == 1
    streamed = llamafactory(dataset="a/b,c/d", streaming=True)
    assert "temperature" not in streamed.recipe["data"] and "in equal shares" in streamed.comments["data.sources"]
    assert "temperature" not in llamafactory(dataset="a/b").recipe["data"]
