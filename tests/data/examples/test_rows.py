from collections import Counter

import pytest
import torch

from cpt.data.rows.build import PreparedData, build_data
from cpt.data.rows.loader import CPTDataLoader
from cpt.data.rows.packing import IGNORED
from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import Data, Evaluation, HeldOut, Phase

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def build(talking, tmp_path):
    def run(form, *sources, evaluation=None, budget=None, seed=1, **options) -> PreparedData:
        data = Data(sources=list(sources), **{"sequence_length": 64, **options})
        more = {
            "evaluation": evaluation or Evaluation(),
            "budget": budget,
            "cache_dir": tmp_path / "cache",
            "form": form,
        }
        return build_data(data, talking(CHATML), seed=seed, **more)

    return run


def talks(number, size=1):
    return [
        {
            "messages": [
                {"role": "user", "content": f"q{n}"},
                {"role": "assistant", "content": f"answer {n} " * (1 + n % size)},
            ]
        }
        for n in range(number)
    ]


def pairs(number):
    return [
        {"prompt": f"question {n}?", "chosen": f" good {n}", "rejected": " bad" * (1 + n % 3)} for n in range(number)
    ]


def learned(row, tokenizer):
    """The texts of a packed row's documents that have labels."""
    ids, labels = row["input_ids"].reshape(-1), row["labels"].reshape(-1)
    assert torch.equal(labels[labels != IGNORED], ids[labels != IGNORED])
    return tokenizer.decode(ids[labels != IGNORED])


def all_rows(prepared):
    return [prepared.rows[number] for number in range(prepared.num_rows)]


@pytest.mark.parametrize("packing", ["best_fit", "none", "token_budget"])
def test_every_conversation_is_learned_once_in_packed_rows(build, rows_file, talking, packing):
    prepared = build("conversation", rows_file("a", talks(40)), packing=packing)
    text = "".join(learned(row, talking(None)) for row in all_rows(prepared))
    assert Counter(text.split("<|endoftext|>")) == Counter([f"answer {n} <|im_end|>" for n in range(40)] + [""])
    assert prepared.form == "conversation" and prepared.sources[0].documents == 40
    assert all(set(row) >= {"input_ids", "labels", "position_ids"} for row in all_rows(prepared))


def test_a_long_conversation_is_cut_at_its_end_and_never_in_pieces(build, rows_file, talking):
    prepared = build("conversation", rows_file("a", talks(40, size=12)), sequence_length=50)
    for row in all_rows(prepared):
        begins = (row["position_ids"] == 0).nonzero().flatten().tolist()
        ids, real = row["input_ids"], row["input_ids"] != talking(None).pad_token_id
        start = talking(None).convert_tokens_to_ids("<|im_start|>")
        assert all(not real[at] or ids[at] == start for at in begins), "a row holds beginnings only"
    assert prepared.sources[0].documents == 40


def test_what_has_nothing_to_learn_after_the_cut_is_left_out_and_counted(build, rows_file):
    long = [{"messages": [{"role": "user", "content": "q" * 100}, {"role": "assistant", "content": "a"}]}]
    prepared = build("conversation", rows_file("a", talks(5) + long * 3))
    assert prepared.sources[0].documents == 5
    assert prepared.sources[0].dropped == {"nothing to learn within sequence_length": 3}
    with pytest.raises(DataError):
        build("conversation", rows_file("b", long))


def test_rows_of_preferences(build, rows_file, talking):
    prepared, tokenizer = build("preference", rows_file("a", pairs(30))), talking(None)
    rows = all_rows(prepared)
    assert all(type(number) is int for row in rows for ids in row.values() for number in ids)
    found = {
        tuple(tokenizer.decode(row[name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")) for row in rows
    }
    assert found == {
        (row["prompt"], f"{row['chosen']}<|endoftext|>", f"{row['rejected']}<|endoftext|>") for row in pairs(30)
    }
    assert prepared.num_rows == 30 and prepared.sources[0].padding == 0


def test_completions_are_cut_and_long_prompts_left_out(build, rows_file):
    long = {"prompt": "p" * 60, "chosen": "c" * 50, "rejected": "r"}
    full = {"prompt": "p" * 64, "chosen": "c", "rejected": "r"}
    prepared = build("preference", rows_file("a", [long, full]))
    (row,) = all_rows(prepared)
    assert [len(row[name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")] == [60, 4, 2]
    assert prepared.sources[0].dropped == {"prompt longer than sequence_length": 1}
    judged = build("judged", rows_file("b", [{"prompt": "p" * 60, "completion": "c" * 50, "label": False}]))
    assert {name: value if name == "label" else len(value) for name, value in judged.rows[0].items()} == {
        "prompt_ids": 60,
        "completion_ids": 4,
        "label": False,
    }


def test_prompts_come_back_as_their_rows(build, rows_file):
    rows = [
        {"prompt": [{"role": "user", "content": f"{n} é"}], "answer": n, "more": [None, {"a": 0.1}]} for n in range(9)
    ]
    rows += [{"prompt": "x" * 64, "answer": 9}, {"prompt": "x" * 65, "answer": 10}]
    prepared = build("prompt", rows_file("a", rows))
    found = sorted(all_rows(prepared), key=lambda row: row["answer"])
    assert found == rows[:10], "a prompt is never cut"
    assert prepared.sources[0].dropped == {"prompt longer than sequence_length": 1}
    assert prepared.sources[0].tokens < 500, "what is kept of a row for rewards is no token"


@pytest.mark.parametrize(
    ("form", "rows"),
    [("conversation", talks(200)), ("preference", pairs(200)), ("prompt", [{"prompt": str(n)} for n in range(200)])],
)
def test_held_out_examples_are_never_trained_on(build, rows_file, form, rows):
    prepared = build(form, rows_file("a", rows), evaluation=Evaluation(held_out_share=0.1))
    held_out = prepared.held_out["a"]
    assert held_out.form == form and 5 <= held_out.num_documents <= 40
    assert prepared.sources[0].documents + held_out.num_documents == 200
    if form != "conversation":
        seen = {str(row) for row in all_rows(prepared)}
        kept = {str(held_out.rows[n]) for n in range(len(held_out.rows))}
        assert not seen & kept and len(kept) == held_out.num_documents


@pytest.mark.parametrize(("form", "rows"), [("conversation", talks(50)), ("preference", pairs(50))])
def test_a_held_out_text_that_is_longer_than_a_row_is_read_to_its_end_in_every_form(
    build, rows_file, tmp_path, form, rows
):
    (tmp_path / "plain.txt").write_text("a plain text " * 40)
    sets = Evaluation(perplexity=[HeldOut(path=str(tmp_path / "plain.txt"))])
    held_out = build(form, rows_file("a", rows), evaluation=sets).held_out["plain"]
    as_documents = build("document", rows_file("b", [{"text": f"{n}"} for n in range(9)]), evaluation=sets).held_out[
        "plain"
    ]
    (read, num_bytes), wanted = (
        (one.rows.num_tokens, one.rows.documents.num_bytes.sum()) for one in (held_out, as_documents)
    )
    assert (read, num_bytes) == wanted and read > 3 * 64


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_gives_them_to_the_trainers_collator(build, rows_file, workers):
    prepared = build("preference", rows_file("a", pairs(20)))
    loader = CPTDataLoader(
        prepared.rows, micro_batch=4, rows_in_all=20, first_row=8, num_workers=workers, collate_fn=lists
    )
    assert [batch["rows"] for batch in loader] == [
        [prepared.rows[n] for n in range(first, first + 4)] for first in (8, 12, 16)
    ]


def lists(rows):
    return {"rows": rows}


@pytest.mark.parametrize(
    ("form", "options", "key"),
    [
        ("conversation", {"packing": "concatenate"}, "data.packing"),
        ("preference", {"packing": "token_budget"}, "data.packing"),
        ("preference", {"phases": [Phase(weights={"a": 1}, context_length=8)]}, "data.phases"),
    ],
)
def test_what_is_for_documents_is_refused(build, rows_file, form, options, key):
    with pytest.raises(RecipeError, match=key):
        build(form, rows_file("a", pairs(3)), **options)
