from benchmarks.data import corpus
from benchmarks.data.corpus import path_of, texts_of, write_corpora, write_parts, write_texts


def test_a_smaller_corpus_is_how_the_larger_one_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "found_texts", lambda: iter(["x" * 400_000] * 5))
    facts = write_corpora(tmp_path, [3, 1])
    small, large = (path_of(tmp_path, size).read_text() for size in (1, 3))
    assert large.startswith(small)
    assert facts[1] == {"text_megabytes": 1.2, "documents": 3, "rounds_over_the_files": 1}
    assert facts[3]["rounds_over_the_files"] == 2


def test_text_that_comes_again_begins_with_another_line(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "found_texts", lambda: iter(["y" * 600_000]))
    write_corpora(tmp_path, [1])
    assert [text[:6] for text in texts_of(path_of(tmp_path, 1))] == ["yyyyyy", "copy 1"]


def test_the_parts_hold_every_document_once(tmp_path):
    write_texts(tmp_path / "all.jsonl", (str(number) * number for number in range(1, 40)))
    write_parts(tmp_path / "all.jsonl", tmp_path / "parts", 4)
    parts = [texts_of(file) for file in sorted((tmp_path / "parts").iterdir())]
    assert sorted(text for part in parts for text in part) == sorted(texts_of(tmp_path / "all.jsonl"))
    sizes = [sum(map(len, part)) for part in parts]
    assert max(sizes) < 1.2 * min(sizes)


def test_found_texts_are_text(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("print(1)\n")
    (tmp_path / "empty.py").write_text(" \n")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe")
    (tmp_path / "picture.png").write_text("no text")
    monkeypatch.setattr(corpus, "ROOTS", (tmp_path,))
    assert list(corpus.found_texts()) == ["print(1)\n"]
