import pytest

from cpt.runs.read_back import read_object, read_objects, read_tree


def test_what_is_whole_is_read_and_nothing_is_said(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1}')
    (tmp_path / "a.yaml").write_text("a: 1e-4\nb: no\n")
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    said: list[str] = []
    assert read_object(tmp_path / "a.json", said) == {"a": 1}
    assert read_tree(tmp_path / "a.yaml", said) == {"a": 1e-4, "b": "no"}
    assert read_objects(tmp_path / "a.jsonl", said) == [{"a": 1}, {"a": 2}] and said == []


def test_a_file_that_is_not_there_is_empty(tmp_path):
    said: list[str] = []
    assert (
        read_object(tmp_path / "x", said) == {} == read_tree(tmp_path / "x", said)
        and read_objects(tmp_path / "x", said) == []
    )
    assert said == []


@pytest.mark.parametrize("content", [b"", b'{"a": ', b"[1]", b"\xff\xfe\x00", b"[" * 100_000, b"5", b"a: [", b"\0"])
def test_rubbish_is_told_and_empty(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    for read in (read_object, read_tree):
        said: list[str] = []
        assert read(path, said) == {} and len(said) == 1 and str(path) in said[0]


def test_a_folder_in_the_place_of_a_file_is_told(tmp_path):
    for read in (read_object, read_objects, read_tree):
        said: list[str] = []
        assert not read(tmp_path, said) and str(tmp_path) in said[0]


def test_lines_that_are_no_objects_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n[2]\n\n{"a": ')
    assert read_objects(tmp_path / "a.jsonl", []) == [{"a": 1}]
