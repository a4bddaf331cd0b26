from cpt.data_commands.preview import excerpt


def test_preview_shows_kept_and_dropped_documents_and_packed_rows(run, tmp_path):
    code, said = run("preview", {"filters": [{"name": "length", "min_characters": 100}]}, "--rows", "4")
    assert code == 0
    lines = [
        line
        for line in said.splitlines()
        if "bad row: null" in line or "dropped: shorter" in line or "dropped: empty" in line
    ]
    assert len(lines) == 5 and any("bad.jsonl:2" in line for line in lines)
    assert "row 0: " in said and "of 64 tokens" in said and " | " in said


def test_preview_of_one_source_needs_its_name(run):
    code, said = run("preview", {}, "--source", "domian")
    assert code == 2 and "Did you mean `domain`" in said


def test_an_excerpt_is_one_line_of_beginning_and_end():
    assert excerpt("a\n b") == "a b" and excerpt("x" * 50 + "y" * 50) == "x" * 40 + " ... " + "y" * 20
