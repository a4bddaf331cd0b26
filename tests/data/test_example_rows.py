import pytest
import torch

from cpt.data.examples.encoder import MARKS
from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import Evaluation, Phase


@pytest.fixture
def examples(build, talking):
    """`examples("preference", source)`: the rows of a run on such examples."""

    def run(form, *sources, **options):
        return build(*sources, by=talking(), form=form, **options)

    return run


def talk(question, answer):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def talks(number, size=1):
    return [talk(f"q{n}", f"answer {n} " * (1 + n % size)) for n in range(number)]


def pairs(number):
    return [
        {"prompt": f"question {n}?", "chosen": f" good {n}", "rejected": " bad" * (1 + n % 3)}
        for n in range(number)
    ]


def all_rows(prepared):
    return [prepared.rows[number] for number in range(prepared.num_rows)]


def test_an_example_without_anything_to_learn_after_the_cut_is_dropped_and_counted(
    examples, rows_file
):
    long = [talk("q" * 100, "a")]
    (report,) = examples("conversation", rows_file("a", talks(5) + long * 3)).sources
    assert (report.documents, list(report.dropped.values())) == (5, [3])
    with pytest.raises(DataError):
        examples("conversation", rows_file("b", long))


def test_a_preference_is_a_row_of_its_own(examples, rows_file, talking):
    prepared, tokenizer = examples("preference", rows_file("a", pairs(30))), talking()
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    found = {tuple(tokenizer.decode(row[name]) for name in names) for row in all_rows(prepared)}
    end = "<|endoftext|>"
    assert found == {
        (row["prompt"], f"{row['chosen']}{end}", f"{row['rejected']}{end}") for row in pairs(30)
    }
    assert prepared.num_rows == 30 and prepared.sources[0].padding == 0


def test_completions_are_cut_and_long_prompts_dropped(examples, rows_file):
    long = {"prompt": "p" * 60, "chosen": "c" * 50, "rejected": "r"}
    full = {"prompt": "p" * 64, "chosen": "c", "rejected": "r"}
    prepared = examples("preference", rows_file("a", [long, full]))
    (row,) = all_rows(prepared)
    assert [len(row[name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")] == [60, 4, 2]
    assert prepared.sources[0].dropped == {"prompt longer than sequence_length": 1}
    judged = examples(
        "unpaired", rows_file("b", [{"prompt": "p" * 60, "completion": "c" * 50, "label": False}])
    )
    row = judged.rows[0]
    assert (len(row["prompt_ids"]), len(row["completion_ids"]), row["label"]) == (60, 4, False)


def test_prompts_come_back_as_their_rows_and_are_never_cut(examples, rows_file):
    rows = [
        {"prompt": [{"role": "user", "content": f"{n} é"}], "answer": n, "more": [None, 0.1]}
        for n in range(9)
    ]
    rows += [{"prompt": "x" * 64, "answer": 9}, {"prompt": "x" * 65, "answer": 10}]
    prepared = examples("prompt", rows_file("a", rows))
    assert sorted(all_rows(prepared), key=lambda row: row["answer"]) == rows[:10]
    assert prepared.sources[0].dropped == {"prompt longer than sequence_length": 1}
    assert prepared.sources[0].tokens < 500, "columns for rewards are not counted as tokens"


@pytest.mark.parametrize(
    ("form", "rows"), [("preference", pairs(200)), ("conversation", talks(200))]
)
def test_held_out_examples_are_never_trained_on(examples, rows_file, form, rows):
    prepared = examples(form, rows_file("a", rows), evaluation=Evaluation(held_out_share=0.1))
    held_out = prepared.held_out["a"]
    assert held_out.form == form and 5 <= held_out.num_documents <= 40
    assert prepared.sources[0].documents + held_out.num_documents == 200
    kept = {str(held_out.rows[n]) for n in range(len(held_out.rows))}
    assert not kept & {str(row) for row in all_rows(prepared)}


@pytest.mark.parametrize(
    ("form", "options", "key"),
    [
        ("conversation", {"packing": "concatenate"}, "data.packing"),
        ("preference", {"packing": "token_budget"}, "data.packing"),
        ("preference", {"phases": [Phase(weights={"a": 1}, context_length=8)]}, "data.phases"),
    ],
)
def test_options_for_documents_are_refused(examples, rows_file, form, options, key):
    with pytest.raises(RecipeError, match=key):
        examples(form, rows_file("a", pairs(3)), **options)


def test_chats_can_be_pre_trained_on_and_held_out(build, rows_file, talking):
    raises = "{% if messages[0].role != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}"
    tokenizer = talking(raises + talking().chat_template)
    tokenizer.add_tokens(list(MARKS[0]), special_tokens=True)
    wrong = {"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}
    chats = [talk(f"What is {n}<|im_end|>?", "A number.") for n in range(40)]
    train = rows_file("talks", [*chats, wrong], chat="messages")
    exam = rows_file("exam", [chats[3], talk("99?", "No.")])
    evaluation = Evaluation(perplexity=[{"path": exam.path, "chat": "messages"}])
    prepared = build(train, by=tokenizer, sequence_length=128, evaluation=evaluation)
    (report,) = prepared.sources
    assert (report.documents, report.held_out) == (39, 1)
    assert report.dropped == {"the chat template raised: the user speaks first": 1}
    ids = torch.cat([row["input_ids"] for row in prepared.chunked[0].chunk(0)])
    text = tokenizer.decode(ids)
    written = tokenizer.apply_chat_template(chats[7]["messages"], tokenize=False) + "<|endoftext|>"
    assert text.count(written) == 1 and "What is 3<" not in text
    turns = int((ids == tokenizer.convert_tokens_to_ids("<|im_end|>")).sum())
    assert turns == 2 * 39, "`<|im_end|>` inside a message does not end a turn"
    assert prepared.held_out["exam"].num_documents == 2
