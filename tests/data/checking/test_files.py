import json
import subprocess
import sys

from cpt.data.checking.files import check_sources, unchecked_sources
from cpt.data.forms import with_form
from cpt.recipe.schema import Component, Data, Evaluation, HeldOut, Source


def complaints(*sources, **options):
    return check_sources(Data(sources=list(sources), **options), Evaluation())


def test_good_sources_give_no_complaint(source):
    assert complaints(source("a", ["text"]), source("b", ["text"])) == []


def test_every_complaint_comes_at_once(source, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    found = complaints(
        Source(path="missing.jsonl"),
        Source(path=str(tmp_path / "empty.jsonl")),
        source("a", ["text"], text_column="body"),
        source("b", ["text"], filters=[Component(name="lenght")]),
    )
    expected = [
        "missing.jsonl: no such file",
        "empty.jsonl: the file is empty",
        "a.jsonl:1: no column `body`. It has: text. Byte 0 of the file. Set `data.sources[2].text_column`",
        "no filter called `lenght`",
    ]
    assert len(found) == 4 and all(part in complaint for part, complaint in zip(expected, found, strict=True))


def test_a_filter_for_all_sources_is_complained_about_once(source):
    found = complaints(source("a", ["text"]), source("b", ["text"]), filters=[Component(name="pattern", drop="(")])
    assert len(found) == 1 and "no regular expression" in found[0]


def test_held_out_sets_are_checked_too(source):
    data = Data(sources=[source("a", ["text"])])
    (found,) = check_sources(data, Evaluation(perplexity=[HeldOut(path="no/*.txt")]))
    assert "no file matches" in found and "evaluation.perplexity[0].path" in found


def test_hub_datasets_are_reported_as_unchecked(source):
    data = Data(sources=[source("a", ["text"]), Source(path="owner/name")])
    assert check_sources(data, Evaluation()) == []
    assert unchecked_sources(data, Evaluation()) == ["`data.sources[1].path`: owner/name (Hub)"]


def test_a_bad_first_row_is_no_complaint_where_bad_rows_are_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text("bad\n")
    source = Source(path=str(tmp_path / "a.jsonl"))
    assert len(complaints(source)) == 1 and complaints(source, on_bad_row="skip") == []


def test_templates_and_functions_are_checked_and_remote_files_are_not(source):
    (template,) = complaints(source("a", ["text"], template="{a.b}"))
    (function,) = complaints(Source(path="no_such_lab:dump"))
    assert "the template '{a.b}' must name columns" in template and "cannot import `no_such_lab`" in function
    data = Data(sources=[Source(path="s3://bucket/*.parquet"), Source(path="no_such_lab:dump")])
    assert unchecked_sources(data, Evaluation()) == ["`data.sources[0].path`: s3://bucket/*.parquet (remote)"]


def test_only_the_first_row_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "good"}) + "\nbad\n")
    assert complaints(Source(path=str(tmp_path / "a.jsonl"))) == []


def test_the_check_needs_no_heavy_library():
    code = "import sys, cpt.data.checking.files; print({'torch', 'transformers', 'datasets'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_folder_of_texts_where_pairs_are_wanted_is_one_complaint(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    (told,) = check_sources(*with_form(Data(sources=[Source(path=str(tmp_path))]), Evaluation(), "preference"))
    assert "holds .txt files, which are plain text" in told and "chosen, rejected" in told
