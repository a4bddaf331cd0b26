import json

import pytest
from tiny import write_recipe


@pytest.fixture
def preview(tiny_recipe, tmp_path, cpt_data):
    """`preview("dpo", rows)`: what is printed of such rows in a pipe."""

    def command(stage, rows, *options):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tiny_recipe.update({"stage": stage, "evaluation": {}, "rewards": ["exact_match"] if stage == "grpo" else []})
        tiny_recipe["data"] |= {"sources": [{"path": str(tmp_path / "rows.jsonl")}]}
        return cpt_data("preview", write_recipe(tiny_recipe, tmp_path / "r.yaml"), *options)

    return command


def tokens_in(said):
    """The line with the tokens of the first example."""
    lines = said.splitlines()
    return lines[next(number for number, line in enumerate(lines) if "rows.jsonl:1: " in line) + 1]


def test_what_is_learned_stands_in_brackets(preview, tmp_path):
    code, said = preview(
        "sft", [{"prompt": "a", "completion": " b"}, {"prompt": "c", "completion": " d"}], "--rows", "1"
    )
    assert code == 0 and f"{tmp_path}/rows.jsonl:1: " in said and " learned" in said and "rows.jsonl:2:" not in said
    line = tokens_in(said)
    assert line.count("[") == line.count("]") >= 2 and line.index("a") < line.index("[") < line.index("b")


def test_what_is_rejected_stands_in_braces(preview):
    code, said = preview("dpo", [{"prompt": "a", "chosen": " b", "rejected": " c"}])
    assert code == 0 and "rejected or unwanted" in said
    line = tokens_in(said)
    assert line.index("a") < line.index("[") < line.index("b") < line.index("{") < line.index("c")


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
