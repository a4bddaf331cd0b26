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
