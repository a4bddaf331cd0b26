from cpt.exporting.card import add_section, replace_serving


def test_a_section_stands_before_the_limits(tmp_path):
    (tmp_path / "README.md").write_text("# m\n\n## Limits\n\n- none\n\n## Serve\n\nold\n")
    add_section(tmp_path, "GGUF", ["one", "two"])
    replace_serving(tmp_path, ["llama-server -m m.gguf"])
    assert (tmp_path / "README.md").read_text() == (
        "# m\n\n## GGUF\n\n- one\n- two\n\n## Limits\n\n- none\n\n## Serve\n\n```bash\nllama-server -m m.gguf\n```\n"
    )


def test_a_card_without_limits_gets_it_at_its_end(tmp_path):
    (tmp_path / "README.md").write_text("# m\n")
    add_section(tmp_path, "GGUF", ["one"])
    assert (tmp_path / "README.md").read_text() == "# m\n\n## GGUF\n\n- one\n"
