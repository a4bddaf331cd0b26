"""`cpt data check`, `preview` and `ingest`."""

import json
import re

import pytest
import yaml
from tiny import write_recipe
from tiny_documents import SENTENCE, write_docx, write_pdf
from transformers import AutoTokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def recipe_with_bad_rows(tiny_recipe, tmp_path):
    """`recipe_with_bad_rows(filters=[...])`: a recipe of two good sources and a bad one."""
    (tmp_path / "bad.jsonl").write_text(
        '{"text": "good one"}\n{"text": null}\n{"text": ""}\nnot json\n'
    )

    def write(**data):
        tiny_recipe["data"]["sources"].append({"path": str(tmp_path / "bad.jsonl")})
        tiny_recipe["data"] |= data
        return write_recipe(tiny_recipe, tmp_path / "r.yaml")

    return write


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_check_names_the_bad_rows_that_would_stop_a_run(cpt, recipe_with_bad_rows, tmp_path):
    code, said = cpt("data", "check", recipe_with_bad_rows(), "--output", tmp_path / "found.jsonl")
    assert (
        code == 2 and "2 bad row(s)" in said and f"{tmp_path}/bad.jsonl:4: not valid JSON" in said
    )
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [row["where"].rpartition(":")[2] for row in rows] == ["2", "4"]


def test_check_reads_documents_without_a_recipe(cpt, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_WORKERS", "0")
    rows = write_rows(tmp_path / "documents.jsonl", [{"text": "Text."}])
    assert cpt("data", "check", rows)[0] == 0 and cpt("data", "check", tmp_path)[0] == 0
    write_rows(tmp_path / "bad.jsonl", [{"text": None}])
    assert cpt("data", "check", tmp_path)[0] == 2
    assert cpt("data", "check", tmp_path, "data.on_bad_row=skip")[0] == 2


def test_check_prints_the_transform_that_drops_shared_lines(cpt, tiny_recipe, tmp_path):
    rows = [{"text": f"Home and about and help\nA text of {n}."} for n in range(30)]
    source = {"path": str(write_rows(tmp_path / "rows.jsonl", rows))}
    tiny_recipe["data"]["sources"] = [source]
    said = cpt("data", "check", write_recipe(tiny_recipe, tmp_path / "r.yaml"))[1]
    assert "in 100.0%" in said and "`data.sources[0].transforms`" in said
    source |= yaml.safe_load(next(line for line in said.splitlines() if "transforms: [" in line))
    said = cpt("data", "check", write_recipe(tiny_recipe, tmp_path / "r.yaml"))[1]
    assert "Home and about" not in said


def talk(question, answer):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


GOOD = [talk(f"question {n}", f"answer {n}") for n in range(30)]


@pytest.fixture
def check_examples(cpt, tiny_recipe, tmp_path):
    """`check_examples(rows)`: the exit code and what is printed for SFT on these rows, with a chat template."""

    def check(rows, *options, template=CHATML):
        tokenizer = AutoTokenizer.from_pretrained(tiny_recipe["tokenizer"]["path"])
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "talking")
        tiny_recipe.update(
            {"stage": "sft", "evaluation": {}, "tokenizer": {"path": str(tmp_path / "talking")}}
        )
        tiny_recipe["data"]["sources"] = [{"path": str(write_rows(tmp_path / "rows.jsonl", rows))}]
        return cpt("data", "check", write_recipe(tiny_recipe, tmp_path / "r.yaml"), *options)

    return check


def test_cut_examples_are_a_mistake_above_a_share(check_examples):
    rows = [*GOOD, talk("long", "word " * 500), talk("longer", "word " * 500)]
    assert check_examples(rows, "--truncated-share", "0.1")[0] == 0
    code, said = check_examples(rows)
    assert code == 2 and "`data.sequence_length`" in said


def test_a_template_of_another_tokenizer_is_a_mistake(check_examples):
    code, said = check_examples(GOOD, template=CHATML.replace("<|im_end|>", "<|end_of_answer|>"))
    assert code == 2 and "<|end_of_answer|>" in said


@pytest.fixture
def preview(cpt, tiny_recipe, tmp_path):
    """`preview("dpo", rows)`: the line that shows the tokens of the first example."""

    def command(stage, rows):
        tiny_recipe.update({"stage": stage, "evaluation": {}})
        tiny_recipe["data"]["sources"] = [{"path": str(write_rows(tmp_path / "rows.jsonl", rows))}]
        code, said = cpt(
            "data", "preview", write_recipe(tiny_recipe, tmp_path / "r.yaml"), "--rows", "1"
        )
        assert code == 0 and "rows.jsonl:2: " not in said, said
        return said.partition("rows.jsonl:1: ")[2].splitlines()[1]

    return command


def test_preview_puts_what_is_learned_in_brackets(preview):
    line = preview(
        "sft", [{"prompt": "a", "completion": " b"}, {"prompt": "c", "completion": " d"}]
    )
    assert line.count("[") == line.count("]") >= 2 and line.index("a") < line.index(
        "["
    ) < line.index("b")


def test_preview_puts_what_is_rejected_in_braces(preview):
    line = preview("dpo", [{"prompt": "a", "chosen": " b", "rejected": " c"}])
    assert line.index("a") < line.index("[") < line.index("b") < line.index("{") < line.index("c")


def test_preview_shows_kept_and_dropped_documents_and_packed_rows(cpt, recipe_with_bad_rows):
    recipe = recipe_with_bad_rows(filters=[{"name": "length", "min_characters": 100}])
    code, said = cpt("data", "preview", recipe, "--rows", "4")
    assert code == 0 and "bad.jsonl:2" in said and "row 0: " in said
    for reason in ("bad row: null", "dropped: shorter", "dropped: empty"):
        assert reason in said


def test_preview_counts_the_documents_that_a_run_trains_on(cpt, tiny_recipe, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": f"{n} text " * 20} for n in range(60)])
    tiny_recipe["data"]["sources"] = [{"path": str(rows), "name": "rows"}]
    tiny_recipe["evaluation"] = {"held_out_share": 0.3}
    recipe = write_recipe(tiny_recipe, tmp_path / "r.yaml")
    counted = re.compile(r"([\d,]+) trained on \(.*?\), ([\d,]+) held out")
    previewed = counted.search(cpt("data", "preview", recipe)[1])
    forecast = counted.search(cpt("mixture", recipe)[1])
    assert previewed.groups() == forecast.groups() and int(previewed[2]) > 0


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"deduplicate": "near"}, ["`data.deduplicate`", "decontamination"]),
        ({"filters": [{"name": "decontaminate", "own_evaluation": False}]}, []),
    ],
)
def test_preview_names_what_only_a_comparison_of_all_documents_drops(
    cpt, tiny_recipe, tmp_path, section, named
):
    tiny_recipe["data"] |= section
    tiny_recipe["evaluation"] = {"held_out_share": 0.3}
    said = cpt("data", "preview", write_recipe(tiny_recipe, tmp_path / "r.yaml"))[1]
    line = said.partition("Not applied here: ")[2]
    assert bool(line) == bool(named) and all(name in line for name in named)


@pytest.mark.heavy
def test_ingest_converts_documents_and_names_those_it_cannot_read(cpt, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_WORKERS", "1")
    library = tmp_path / "library"
    library.mkdir()
    write_pdf(library / "a.pdf", [[SENTENCE]])
    write_docx(library / "b.docx")
    (library / "c.epub").write_bytes(b"PK\x03\x04 cut off")
    (library / "d.png").touch()
    code, said = cpt("data", "ingest", library, "--output", tmp_path / "out")
    assert code == 2 and "damaged zip" in said and "c.epub" in said and "1 other file(s)" in said
    assert len((tmp_path / "out/documents-00000.jsonl").read_text().splitlines()) == 2
    assert cpt("data", "ingest", library, "--output", tmp_path / "out", "--on-bad", "skip")[0] == 0
