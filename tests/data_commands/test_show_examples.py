import json

import pytest
from rich.console import Console
from tiny import write_recipe

from cpt.data.examples.encoders import encoder_of
from cpt.data.readers.forms import source_with_form
from cpt.data.store.tokenization import DocumentEncoder
from cpt.data_commands.preview import Example, show_examples
from cpt.recipe.schema import Source
from cpt.tokenizer.load import load_tokenizer


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


def test_colours_on_a_terminal_instead_of_brackets(tiny_recipe):
    from cpt.recipe.schema import Model, Tokenizer

    tokenizer = load_tokenizer(Tokenizer(**tiny_recipe["tokenizer"]), Model())
    source = source_with_form(Source(path="a.jsonl"), "conversation", "k")
    console = Console(force_terminal=True, color_system="truecolor", width=200)
    with console.capture() as captured:
        show_examples(
            console, [Example("a.jsonl:1", "a b")], encoder_of(source, DocumentEncoder(tokenizer), "k"), tokenizer, 1
        )
    assert "\x1b[30;10" in captured.get() and "[a" not in captured.get()
