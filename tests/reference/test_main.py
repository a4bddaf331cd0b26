from cpt.reference.__main__ import PAGES, main


def test_the_pages_are_written_into_a_folder_that_need_not_be_there(tmp_path, monkeypatch):
    monkeypatch.setitem(PAGES, "recipe.md", lambda: "# Keys\n")
    monkeypatch.setitem(PAGES, "commands.md", lambda: "# Commands\n")
    main(tmp_path / "a" / "b")
    assert [path.name for path in sorted((tmp_path / "a" / "b").iterdir())] == ["commands.md", "recipe.md"]
    assert (tmp_path / "a" / "b" / "recipe.md").read_text() == "# Keys\n"
