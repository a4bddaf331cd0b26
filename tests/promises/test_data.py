"""Data promises: which documents a run reads, in which order and shares, and which it drops or refuses."""

import json
import re
from collections import Counter
from itertools import accumulate, chain, combinations, pairwise
from operator import eq
from pathlib import Path

import pytest
import torch
from promises.conftest import WORDS, built, events, losses, trainer_of, write_texts
from tokenizers import models
from tokenizers.processors import TemplateProcessing
from torch.utils.data import DataLoader, Subset
from transformers import AutoTokenizer

from cpt import open_mixture
from cpt.errors import DataError, RecipeError

pytestmark = pytest.mark.heavy
TEXTS = [
    f"{WORDS[: 7 + number % 31]} number {number}." for number in range(80)
]  # each fits into a row of 64 tokens
END = "<|end|>"


def jsonl(path, texts):
    return str(write_texts(path, texts))


class Epoch:
    """One time through the data, row by row."""

    def __init__(self, file, overrides=()):
        self.file, self.overrides = file, overrides
        self.recipe, self.tokenizer, self.data = built(file, overrides)
        self.rows = self.read(0, self.data.num_rows)

    def read(self, first, last):
        """These rows, each as a batch."""
        rows = (self.data.rows[number] for number in range(first, last))
        return [
            {name: value if value.dim() == 2 else value[None] for name, value in row.items()}
            for row in rows
        ]

    def trainer(self):
        return trainer_of(self.file, self.overrides)[0]

    @property
    def pieces(self):
        """The token ids of each document in each row, without padding."""
        lines = ((batch, line) for batch in self.rows for line in range(len(batch["input_ids"])))
        return [piece for batch, line in lines for piece in self.pieces_of(batch, line)]

    def pieces_of(self, batch, line=0):
        ids, positions = batch["input_ids"][line], batch["position_ids"][line]
        pieces = ids.tensor_split((positions == 0).nonzero().flatten()[1:])
        mask = batch["attention_mask"][line] if "attention_mask" in batch else torch.ones_like(ids)
        masks = mask.tensor_split((positions == 0).nonzero().flatten()[1:])
        pieces = [piece[kept == 1].tolist() for piece, kept in zip(pieces, masks, strict=True)]
        return [piece for piece in pieces if set(piece) - {self.tokenizer.eos_token_id}]

    @property
    def texts(self):
        """How often each document was read."""
        return Counter(self.tokenizer.decode(piece).removesuffix(END) for piece in self.pieces)


@pytest.fixture
def epoch(recipe, write, tmp_path):
    """One time through texts, with the recipe's `data` and `evaluation` as given."""

    def read(texts=TEXTS, *overrides, source=None, evaluation=None, **data):
        sources = data.pop("sources", None) or [
            {"path": jsonl(tmp_path / "texts.jsonl", texts), **(source or {})}
        ]
        sections = {**recipe, "data": {**recipe["data"], "sources": sources, **data}}
        file = write({**sections, "evaluation": evaluation or {}})
        return Epoch(file, overrides)

    return read


def same_rows(one, other):
    are_same = (
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )
    return len(one) == len(other) and all(are_same)


@pytest.fixture
def changed_tokenizer(recipe, tokenizer_folder, tmp_path):
    """Let the recipe use the tokenizer with a change."""

    def save(change):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        change(tokenizer)
        tokenizer.save_pretrained(tmp_path / "changed")
        recipe["tokenizer"] = {"path": str(tmp_path / "changed")}
        return tokenizer

    return save


# Reading


@pytest.mark.parametrize("packing", ["best_fit", "concatenate", "none", "token_budget"])
def test_one_epoch_holds_each_token_of_each_document_once(epoch, packing):
    long = [" ".join([WORDS] * 9) + f" {number}" for number in range(5)]
    texts = [*TEXTS, *long] if packing in ("best_fit", "concatenate") else TEXTS
    read = epoch(texts, "training.per_device_train_batch_size=1", packing=packing)
    written = ([*read.tokenizer(text)["input_ids"], read.tokenizer.eos_token_id] for text in texts)
    documents = [tuple(ids) for ids in written]
    pieces = [tuple(piece) for piece in read.pieces]
    found, expected = Counter(chain(*pieces)), Counter(chain(*documents))
    if packing == "concatenate":  # a row may begin with an end, which `pieces` takes for padding
        found[read.tokenizer.eos_token_id] = expected[read.tokenizer.eos_token_id]
    assert found == expected
    parts = {
        ids[begin:end] for ids in documents for begin, end in combinations(range(len(ids) + 1), 2)
    }
    assert parts.issuperset(pieces), "not in their order"
    assert packing == "concatenate" or all(read.texts[text] == 1 for text in TEXTS)


def test_documents_read_in_small_chunks_are_all_read_once(epoch):
    whole = epoch(packing="none")
    chunked = epoch(packing="none", chunk_bytes=1500)  # the store already holds the whole source
    chunked.rows = chunked.read(0, len(TEXTS))
    assert whole.texts == chunked.texts == Counter(TEXTS) and not same_rows(
        whole.rows, chunked.rows
    )


def test_lines_that_begin_where_a_chunk_does_are_read_once(epoch):
    texts = [f"number {number:03}." for number in range(80)]
    length = len(json.dumps({"text": texts[0]})) + 1
    assert epoch(texts, chunk_bytes=8 * length).texts == Counter(texts)


def test_a_template_makes_the_text_of_several_columns(epoch, tmp_path):
    books = [{"body": f"the text {number}", "title": f"the {number}. word"} for number in range(3)]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(book) + "\n" for book in books))
    read = epoch(sources=[{"path": str(tmp_path / "books.jsonl"), "template": "{title}: {body}"}])
    assert read.texts == {f"the {number}. word: the text {number}": 1 for number in range(3)}


def test_an_end_token_written_in_a_text_does_not_end_the_document(epoch):
    texts = [f"before {END} after", f"{END}first", f"last{END}"]
    read = epoch(texts)
    assert read.texts == Counter(texts)
    for piece in read.pieces:
        assert piece.index(read.tokenizer.eos_token_id) == len(piece) - 1, "it ends before its end"


def test_max_documents_takes_the_first_ones(epoch):
    assert epoch(source={"max_documents": 9}).texts == Counter(TEXTS[:9])


def test_a_changed_file_is_read_anew(epoch, tmp_path):
    assert epoch().texts == Counter(TEXTS)
    others = [text.replace("number", "figure") for text in TEXTS]
    assert epoch(others).texts == Counter(others)


def test_another_tokenizer_makes_other_tokens_of_the_same_files(epoch, changed_tokenizer):
    def number_tokens_backwards(tokenizer):
        vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
        backwards = {token: 319 - number for token, number in vocabulary.items() if number}
        tokenizer.backend_tokenizer.model = models.BPE(backwards, [])

    assert epoch().texts == Counter(TEXTS)
    changed_tokenizer(number_tokens_backwards)
    assert epoch().texts == Counter(TEXTS)


def test_documents_begin_with_a_begin_token_where_the_tokenizer_adds_one(epoch, changed_tokenizer):
    def add_begin(tokenizer):
        tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
        begin = ("<|begin|>", tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|begin|> $A", special_tokens=[begin]
        )

    begin, read = changed_tokenizer(add_begin).bos_token_id, epoch()
    assert all(piece[0] == begin and piece.count(begin) == 1 for piece in read.pieces)
    assert read.texts == Counter(f"<|begin|>{text}" for text in TEXTS)


def test_fill_in_the_middle_keeps_each_document_whole(epoch, changed_tokenizer):
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    changed_tokenizer(
        lambda tokenizer: tokenizer.add_special_tokens({"additional_special_tokens": marks})
    )
    read = epoch(source={"fill_in_the_middle": {"rate": 1, "suffix_first_rate": 0}})
    written = [re.split("|".join(map(re.escape, marks)), text) for text in read.texts]
    assert Counter(prefix + middle + suffix for _, prefix, suffix, middle in written) == Counter(
        TEXTS
    )
    begins = [len(prefix) / len(prefix + middle + suffix) for _, prefix, suffix, middle in written]
    assert min(begins) < 0.2 and max(begins) > 0.6, "cut at a fixed place"
    for part in zip(*(pieces[1:] for pieces in written), strict=True):
        assert sum(map(bool, part)) > 0.7 * len(TEXTS), "a part is mostly empty"


def test_sliding_windows_overlap_and_hold_each_token(epoch):
    long = [" ".join([WORDS] * count) + f" {count}" for count in (2, 3, 5)]
    read = epoch(long, packing="sliding_window", stride=16, sequence_length=32)
    expected = []
    for text in long:
        ids = [*read.tokenizer(text)["input_ids"], read.tokenizer.eos_token_id]
        last = next(begin for begin in range(0, len(ids), 16) if begin + 32 >= len(ids))
        expected += [tuple(ids[begin : begin + 32]) for begin in range(0, last + 1, 16)]
    assert Counter(map(tuple, read.pieces)) == Counter(expected)


def test_a_context_length_cuts_documents_without_changing_the_rows(rows_of, tmp_path):
    sources = [{"path": jsonl(tmp_path / "t.jsonl", [" ".join([WORDS] * 9)] * 9), "name": "t"}]
    phases = [{"until": 64 * 4, "weights": {"t": 1}, "context_length": 16}, {"weights": {"t": 1}}]
    (cut, _), (whole, _) = (
        rows_of(sources, "budget.tokens=1M", **more) for more in ({"phases": phases}, {})
    )
    for number in range(6):
        row, other = cut[number], whole[number]
        assert torch.equal(row["input_ids"], other["input_ids"])
        context = 16 if number < 4 else 64
        assert torch.equal(row["position_ids"], other["position_ids"] % context)
        assert (row["labels"][row["position_ids"] == 0] == -100).all()
    assert int((cut[0]["labels"] != -100).sum()) < int((whole[0]["labels"] != -100).sum())
    assert torch.equal(cut[5]["labels"], whole[5]["labels"])


def test_max_tokens_bounds_what_is_read_of_a_source(epoch):
    """The first documents that fit as a whole."""
    read, bound = epoch(source={"max_tokens": 200}), 0
    ends = accumulate(len(read.tokenizer(text)["input_ids"]) + 1 for text in TEXTS)
    bound = sum(end <= 200 for end in ends)
    assert read.texts == Counter(TEXTS[:bound])


# Dropping


def test_a_filter_and_a_transform_can_be_my_own_functions(epoch, my_lab, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(my_lab)
    sources = [
        {"path": jsonl(tmp_path / "t.jsonl", TEXTS)}
    ]  # one file, so that stored tokens could be mistaken
    filters, transforms = (
        [{"name": "my_lab:too_short", "min_words": 6}],
        [{"name": "my_lab:shouted"}],
    )
    kept = [text for text in TEXTS if len(text.split()) >= 6]
    assert epoch(sources=sources, filters=filters).texts == Counter(kept) and len(kept) < len(TEXTS)
    read = epoch(sources=sources, filters=filters, transforms=transforms)
    assert read.texts == Counter(text.upper() for text in kept)


def test_exact_duplicates_are_read_once(epoch):
    assert epoch(TEXTS * 2, deduplicate="exact").texts == Counter(TEXTS)


def test_near_duplicates_are_read_once_and_others_stay(epoch):
    """Others: short documents that differ in a word or a sign, and a long one that shares half of its text."""
    long = [
        f"{number} {WORDS} {WORDS[number:]} number {number} {'abcdefghij'[number] * 9}"
        for number in range(5)
    ]
    half = f"{WORDS} {''.join(reversed(WORDS))}"
    copies = [long[0] + "!", f"{long[3]} ({long[3][-1]}", TEXTS[2] + "!"]
    different = [*long, half, *TEXTS[:9]]
    read = epoch([*different, *copies], deduplicate="near", sequence_length=128)
    assert read.texts == Counter(different)


def test_duplicates_in_two_sources_are_read_from_the_first(epoch, tmp_path):
    texts = {"a": TEXTS[:50], "b": TEXTS}
    sources = [{"path": jsonl(tmp_path / f"{name}.jsonl", lines)} for name, lines in texts.items()]
    phases = [{"until": 64 * 4, "weights": {"b": 1}}, {"weights": {"a": 1}}]
    read = epoch(
        TEXTS,
        "budget.tokens=1M",
        sources=sources,
        deduplicate="exact_across_sources",
        phases=phases,
    )
    assert read.data.num_tokens == sum(len(read.tokenizer(text)["input_ids"]) + 1 for text in TEXTS)
    read.rows = read.read(0, 4)
    assert read.texts and read.texts.keys() <= {*TEXTS[50:]}, "the second source has copies"
    read.rows = read.read(4, 40)
    assert read.texts.keys() == {*TEXTS[:50]}, "the first source lacks documents"


def test_held_out_documents_are_never_trained_on_and_are_what_is_evaluated(epoch, tmp_path):
    # A copy in another source is held out, too.
    sources = [{"path": jsonl(tmp_path / f"{name}.jsonl", TEXTS)} for name in "ab"]
    read = epoch(sources=sources, evaluation={"held_out_share": 0.2})
    held_out, trainer = [text for text in TEXTS if text not in read.texts], read.trainer()
    assert 4 <= len(held_out) <= 30 and len(read.texts) + len(held_out) == len(TEXTS)
    written = (
        [*read.tokenizer(text)["input_ids"], read.tokenizer.eos_token_id] for text in held_out
    )
    documents = [torch.tensor([ids]) for ids in written]
    with torch.no_grad():
        sums = [
            trainer.model.eval()(ids, labels=ids).loss * (ids.shape[1] - 1) for ids in documents
        ]
    by_hand = float(sum(sums)) / sum(ids.shape[1] - 1 for ids in documents)
    assert trainer.evaluate()["eval_a_loss"] == pytest.approx(by_hand, rel=1e-4)


def test_documents_of_a_held_out_file_are_not_trained_on(epoch, tmp_path):
    evaluation = {"perplexity": [{"path": jsonl(tmp_path / "held.jsonl", TEXTS[:9])}]}
    filters = [
        {"name": "decontaminate", "own_evaluation": False}
    ]  # equal texts are dropped without it, too
    assert epoch(evaluation=evaluation, filters=filters).texts == Counter(TEXTS[9:])


def test_a_bad_row_ends_the_run_with_its_file_and_line(epoch, tmp_path):
    write_texts(tmp_path / "bad.jsonl", (f"document {number}" for number in range(1500)))
    with (tmp_path / "bad.jsonl").open("a") as file:
        file.write('{"text": \n')  # few enough to be skipped, had it been asked for
    with pytest.raises(DataError, match=r"bad\.jsonl(:| line )1501"):
        epoch(sources=[{"path": str(tmp_path / "bad.jsonl")}])


def test_bad_rows_are_skipped_up_to_a_share_and_listed(epoch, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_CACHE", str(tmp_path / "store"))
    with write_texts(tmp_path / "bad.jsonl", TEXTS).open("a") as file:
        file.write("no json\n")
    sources = [{"path": str(tmp_path / "bad.jsonl")}]
    assert epoch(sources=sources, on_bad_row="skip", max_bad_share=0.1).texts == Counter(TEXTS)
    listed = "".join(file.read_text() for file in (tmp_path / "store").rglob("bad_rows.jsonl"))
    for row in map(json.loads, listed.splitlines()):
        assert (row["where"], row["content"]) == (f"{tmp_path / 'bad.jsonl'}:81", "no json")
    assert listed
    with pytest.raises(DataError, match=r"bad\.jsonl.*max_bad_share"):
        epoch(sources=sources, on_bad_row="skip", max_bad_share=0.001)


@pytest.mark.parametrize(
    "change", [{"text_column": "body"}, {"path": "nowhere/*.jsonl"}, {"path": "empty.jsonl"}]
)
def test_a_source_without_documents_is_refused(epoch, tmp_path, change, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError) as refused:
        epoch(sources=[{"path": jsonl(tmp_path / "t.jsonl", TEXTS), **change}])
    (value,) = change.values()
    assert value in str(refused.value)
    assert "text_column" not in change or "Found: text" in str(refused.value)


# Order and shares


@pytest.fixture
def two_sources(tmp_path):
    """Texts in capital and in small letters, so that the source of each token is known."""
    texts = {
        "loud": [text.upper() for text in TEXTS],
        "soft": [" ".join([text] * 5) for text in TEXTS],
    }
    files = {name: jsonl(tmp_path / f"{name}.jsonl", lines) for name, lines in texts.items()}
    return [{"path": path, "name": name, "weight": 1} for name, path in files.items()]


def share_of_capitals(rows, first, last, tokenizer):
    """The share of tokens that are in capital rows."""
    capital, counts = set(tokenizer(TEXTS[0][:3].upper())["input_ids"]), Counter()
    for row in (rows[number] for number in range(first, last)):
        padding = int(
            ((row["input_ids"] == tokenizer.eos_token_id) & (row["labels"] == -100)).sum()
        )
        counts[int(row["input_ids"][0]) in capital] += len(row["input_ids"]) - padding
    return counts[True] / counts.total()


@pytest.fixture
def rows_of(recipe, write):
    def prepared(sources, *overrides, **data):
        file = write({**recipe, "data": {**recipe["data"], "sources": sources, **data}})
        _, tokenizer, made = built(file, overrides)
        return made.rows, tokenizer

    return prepared


@pytest.mark.parametrize("weight", [0.7, 0.05])
def test_weights_are_shares_of_tokens_within_a_tenth_of_a_point(rows_of, two_sources, weight):
    two_sources[0]["weight"], two_sources[1]["weight"] = 3 * weight, 3 * (1 - weight)
    rows, tokenizer = rows_of(two_sources)
    assert share_of_capitals(rows, 0, 4000, tokenizer) == pytest.approx(weight, abs=1e-3)


def test_a_temperature_weighs_sources_by_a_root_of_their_size(rows_of, two_sources):
    rows, tokenizer = rows_of(two_sources, temperature=2.0)
    files = [Path(source["path"]).read_text().splitlines() for source in two_sources]
    tokens = [
        sum(len(tokenizer(json.loads(line)["text"])["input_ids"]) + 1 for line in lines)
        for lines in files
    ]
    roots = [count**0.5 for count in tokens]
    assert share_of_capitals(rows, 0, 3000, tokenizer) == pytest.approx(
        roots[0] / sum(roots), abs=2e-3
    )


def test_phases_change_the_weights_where_they_say(rows_of, two_sources):
    phases = [{"until": 64 * 50, "weights": {"loud": 1}}, {"weights": {"loud": 0.2, "soft": 0.8}}]
    rows, tokenizer = rows_of(two_sources, "budget.tokens=1M", phases=phases)
    assert share_of_capitals(rows, 0, 50, tokenizer) == 1
    assert share_of_capitals(rows, 50, 2050, tokenizer) == pytest.approx(0.2, abs=0.002)


def test_a_source_continues_where_it_was_when_weights_change(rows_of, two_sources):
    """Each row of a source is read once before any is read again."""
    until = [64 * 10, 64 * 20, 64 * 30]
    phases = [
        {"until": end, "weights": {"loud": 1, "soft": index}} for index, end in enumerate(until)
    ]
    rows, tokenizer = rows_of(
        two_sources, "budget.tokens=1M", phases=[*phases, {"weights": {"loud": 1}}]
    )
    capital = set(tokenizer(TEXTS[0][:3].upper())["input_ids"])
    loud = [
        row for row in (rows[number] for number in range(60)) if int(row["input_ids"][0]) in capital
    ]
    texts = Counter(
        text
        for row in loud
        for text in tokenizer.decode(row["input_ids"]).split(END)
        if "NUMBER" in text
    )
    most = max(texts.values())
    assert len(texts) == len(TEXTS) and most - min(texts.values()) <= 1


def test_weights_of_a_linear_phase_move_from_those_before(rows_of, two_sources):
    change = {"until": 64 * 3264, "weights": {"soft": 1}, "change": "linear"}
    phases = [{"until": 64 * 64, "weights": {"loud": 1}}, change, {"weights": {"soft": 1}}]
    rows, tokenizer = rows_of(two_sources, "budget.tokens=1M", phases=phases)
    quarters = [
        share_of_capitals(rows, begin, begin + 800, tokenizer) for begin in range(64, 3264, 800)
    ]
    assert quarters == pytest.approx([0.875, 0.625, 0.375, 0.125], abs=0.02)


def order_of(read) -> list[str]:
    return [read.tokenizer.decode(piece).removesuffix(END) for piece in read.pieces]


def assert_shuffled(order, other) -> None:
    """The same texts; few of them are where they were, or beside the same neighbour."""
    assert Counter(order) == Counter(other) and len(order) == len(TEXTS)
    assert sum(map(eq, order, other)) < 0.2 * len(order), "most are in their former place"
    neighbours = {*pairwise(order)} & {
        *pairwise(other)
    }  # documents that fit together may meet again
    assert len(neighbours) < 0.3 * len(order), "most are beside their former neighbour"


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_another_seed_is_another_order_of_the_same_documents(epoch, packing):
    one, other = (order_of(epoch(TEXTS, f"seed={seed}", packing=packing)) for seed in (1, 7))
    assert_shuffled(one, other)
    assert_shuffled(one, TEXTS)


def test_a_second_epoch_reads_the_same_documents_in_another_order(epoch):
    for packing in ("best_fit", "none"):
        read = epoch(packing=packing)
        number, first = len(read.rows), order_of(read)
        lengths = [[len(piece) for piece in read.pieces_of(row)] for row in read.rows]
        read.rows = read.read(number, 2 * number)
        assert_shuffled(order_of(read), first)
        later = [[len(piece) for piece in read.pieces_of(row)] for row in read.rows]
        assert sum(map(eq, later, lengths)) < 0.5 * len(lengths), "rows do not change places"


def test_more_than_there_is_can_be_refused(epoch, tmp_path):
    """Where one of two sources would be read more often than it allows, and not where it is read just so often."""
    few = {"path": jsonl(tmp_path / "few.jsonl", TEXTS[:5]), "weight": 0.3}
    many = {"path": jsonl(tmp_path / "many.jsonl", TEXTS[5:] * 5), "weight": 0.7, "max_epochs": 1}
    read = epoch(sources=[few, many])
    read.rows = read.read(0, 2048 // 64)  # the budget
    times = sum(read.texts[text] for text in TEXTS[:5]) / 5
    tokens = sum(len(ids) + 1 for ids in read.tokenizer(TEXTS[:5])["input_ids"])
    assert times > 2
    for allowed in (1, times - 0.01):
        with pytest.raises(RecipeError) as refused:
            epoch(sources=[{**few, "max_epochs": allowed}, many])
        assert f"`few`: it has {tokens} tokens, the run needs {times:.2f} times" in str(
            refused.value
        )
        assert "`many`" not in str(refused.value) and "max_epochs" in str(refused.value)
    _, _, allowed = built(read.file, [f"data.sources.0.max_epochs={times}"])
    assert len([allowed.rows[number] for number in range(2048 // 64)]) == 32
    with pytest.raises(DataError, match=r"few\.jsonl: all rows are used up after 7 epoch"):
        [allowed.rows[number] for number in range(2048 // 64, 4096 // 64)]


def test_a_mixture_opens_in_a_plain_data_loader(recipe, write, rows_of):
    rows, tokenizer = rows_of(recipe["data"]["sources"])
    alone = open_mixture(write(recipe, "mixture.yaml"), tokenizer)
    batches = list(DataLoader(Subset(alone, range(8)), batch_size=4))
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4]
    for row in range(8):
        assert all(
            torch.equal(batches[row // 4][name][row % 4], value)
            for name, value in rows[row].items()
        )
    later = next(iter(DataLoader(alone, batch_size=4, sampler=range(4, len(alone)))))
    assert all(torch.equal(later[name], value) for name, value in batches[1].items())


def test_a_mixture_file_is_opened_with_another_length_and_order(recipe, write, tmp_path, rows_of):
    rows, _ = rows_of(recipe["data"]["sources"])
    mixture = write(recipe["data"], "mixture.yaml")
    again, other = (
        open_mixture(mixture, recipe["tokenizer"]["path"], seed=seed) for seed in (None, 7)
    )
    assert same_rows([again[row] for row in range(8)], [rows[row] for row in range(8)])
    assert not same_rows([other[row] for row in range(8)], [rows[row] for row in range(8)])
    short = open_mixture(mixture, recipe["tokenizer"]["path"], sequence_length=32)
    assert all(len(value) == 32 for row in range(8) for value in short[row].values())


# Rows


@pytest.mark.parametrize("packing", ["best_fit", "token_budget"])
def test_the_loss_of_packed_documents_is_that_of_each_alone(epoch, packing):
    read = epoch(TEXTS, "training.per_device_train_batch_size=1", packing=packing)
    model = read.trainer().model.eval()
    most_padding = min(read.rows, key=lambda batch: sum(map(len, read.pieces_of(batch))))
    most_pieces = max(
        read.rows, key=lambda batch: len(read.pieces_of(batch)) * len(batch["input_ids"])
    )
    for batch in (most_pieces, most_padding):
        pieces = [
            piece
            for line in range(len(batch["input_ids"]))
            for piece in read.pieces_of(batch, line)
        ]
        assert {piece.count(read.tokenizer.eos_token_id) for piece in pieces} <= {0, 1}, (
            "padding is attended to"
        )
        with torch.no_grad():
            packed = model(**batch).loss
            documents = (torch.tensor([piece]) for piece in pieces)
            alone = [model(ids, labels=ids).loss * (ids.shape[1] - 1) for ids in documents]
        assert float(packed) == pytest.approx(
            float(sum(alone)) / sum(len(piece) - 1 for piece in pieces), rel=1e-5
        )


@pytest.fixture
def rows_of_chat(recipe, write, tmp_path, changed_tokenizer):
    """Rows of one chat, and their tokenizer."""

    def add_template(tokenizer):
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )

    def prepared(*turns, length, **budget):
        messages = [{"role": role, "content": content} for role, content in turns]
        (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
        data = {"sequence_length": length, "sources": [{"path": str(tmp_path / "chats.jsonl")}]}
        changed_tokenizer(add_template)
        _, tokenizer, made = built(write({**recipe, "stage": "sft", "data": data, **budget}))
        return made.rows, tokenizer

    return prepared


def test_of_a_chat_the_assistants_words_are_learned_and_no_others(rows_of_chat):
    question, answer = [("system", "be short"), ("user", "hello")], ("assistant", "hi there")
    rows, tokenizer = rows_of_chat(
        *question, answer, ("user", "bye <|im_end|>"), ("assistant", "farewell"), length=128
    )
    learned = tokenizer.decode(rows[0]["labels"][rows[0]["labels"] != -100])
    assert learned == f"hi there<|im_end|>farewell<|im_end|>{END}"


def test_an_example_too_long_for_a_row_loses_its_end_and_never_shares_a_row_half(rows_of_chat):
    turns = ("user", "hello"), ("assistant", " ".join([WORDS] * 20))
    rows, tokenizer = rows_of_chat(*turns, length=64, budget={"epochs": 4})
    assert (rows[0]["position_ids"] == torch.arange(64)).all()
    begin = f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n{WORDS}"
    assert tokenizer.decode(rows[0]["input_ids"]).startswith(begin)
    assert torch.equal(rows[0]["input_ids"], rows[1]["input_ids"])


# The same batches for every start


@pytest.fixture
def seen(together, recipe, write, my_lab):
    """The rows of each step that the model really saw in a run."""

    def train(name, *overrides, processes=1, **options):
        callback = f'monitoring.callbacks=[{{name: "my_lab:Seen", file: {my_lab}/{name}.jsonl}}]'
        words = (
            "train",
            write(recipe),
            f"name={name}",
            callback,
            "training.per_device_train_batch_size=1",
            *overrides,
        )
        typed = together(processes, *words, folder=my_lab, **options)
        assert [one.wait().returncode for one in typed] == [0] * processes, typed[0].output
        steps = {}
        for line in map(json.loads, (my_lab / f"{name}.jsonl").read_text().splitlines()):
            steps.setdefault(line["step"], []).extend(line["rows"])
        return {step: sorted(rows) for step, rows in steps.items()}

    return train


def test_one_byte_changed_in_the_store_is_noticed_and_changes_no_run(cpt, recipe, write, tmp_path):
    recipe["budget"]["tokens"] = 512
    file, own = write(recipe), {"environment": {"CPT_CACHE": str(tmp_path / "store")}}
    assert (
        cpt("train", file, "name=before", **own).returncode == 0
        and cpt("store", "verify", **own).returncode == 0
    )
    stored = max((tmp_path / "store").rglob("*.bin"), key=lambda path: path.stat().st_size)
    content = bytearray(stored.read_bytes())
    content[len(content) // 2] ^= 1
    stored.write_bytes(content)
    assert cpt("store", "verify", **own).returncode == 2
    assert cpt("train", file, "name=after", **own).returncode == 0
    assert losses(tmp_path / "runs/after") == losses(tmp_path / "runs/before")
    assert [event["kind"] for event in events(tmp_path / "runs/after")] == ["damaged_file"]


@pytest.mark.slow
def test_any_number_of_processes_and_workers_trains_on_the_same_rows_in_each_step(seen, tmp_path):
    plain = seen("plain")
    assert len(plain) == 8 and all(len(rows) == 4 for rows in plain.values())
    assert seen("two", processes=2) == plain
    assert seen("four", processes=4) == plain
    empty_store = {"CPT_CACHE": str(tmp_path / "empty")}
    assert seen("workers", "training.dataloader_num_workers=2", environment=empty_store) == plain


@pytest.mark.slow
def test_resumed_at_any_step_with_an_empty_store_it_reads_the_same_batches(seen, recipe, tmp_path):
    recipe["data"] |= {"chunk_bytes": 5000}
    recipe["checkpoints"] = {"every_steps": 1, "keep": None}
    plain = seen("run")
    for step in (7, 4, 1):
        (tmp_path / "run.jsonl").unlink()
        checkpoint, store = (
            tmp_path / f"runs/run/checkpoint-{step}",
            {"CPT_CACHE": str(tmp_path / f"empty-{step}")},
        )
        again = seen("run", "--resume", checkpoint, environment=store)
        assert again == {later: rows for later, rows in plain.items() if later > step}
