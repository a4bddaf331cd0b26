"""Lines that most documents share are found, shown and dropped; what only looks like them is not."""

import json
import random

import pytest

from cpt.data.readers import shared_lines
from cpt.data.readers.filters import drop_lines
from cpt.data.readers.shared_lines import SharedLines, sample_lines, shared_line_warnings
from cpt.recipe.schema import Data, Source

MENU = "- Home\n- About\n- Download now"
FOOTER = "This page was last modified by its builders."


WORDS = ("wind", "sea", "rock", "ship", "light", "table", "query", "index", "page", "row", "lock")


def prose(seed):
    draw = random.Random(seed)
    return "\n\n".join(" ".join(draw.choices(WORDS, k=40)) + "." for _ in range(6))


def found_in(texts):
    shared = SharedLines()
    for text in texts:
        shared.add(text)
    return shared, shared.found()


PAGES = [f"{MENU}\n\n# {seed}\n\n{prose(seed)}\n\n  {FOOTER}\t" for seed in range(40)]


def test_a_menu_of_short_lines_and_a_footer_are_found_with_their_shares():
    shared, found = found_in([*PAGES, *map(prose, range(100, 110))])
    assert found == {FOOTER: 40, MENU: 40}
    text = sum(map(len, [*PAGES, *map(prose, range(100, 110))]))
    assert shared.share_of_text(found) == pytest.approx(40 * len(MENU + FOOTER) / text)
    assert "in 80.0%" in shared.summary(found)


def test_a_paragraph_counts_for_the_lines_that_are_not_shared_alone():
    long = ["A line of many words.", "And another one of them.", "- Home"]
    pages = [f"{prose(seed)}\n\n" + "\n".join(long) for seed in range(30)]
    alone = [*pages, *(f"{long[0]}\n{prose(seed)}" for seed in range(30, 36))]
    shared, found = found_in(alone)
    assert found == {"\n".join(long): 30, long[0]: 36, long[1]: 30}
    text = sum(map(len, alone))
    expected = 36 * len(long[0]) + 30 * len(long[1]) + 30 * len(long[2])
    assert shared.share_of_text(found) == pytest.approx(expected / text)
    assert found_in([page.removesuffix("\n- Home") + f"\n{long[0]}" for page in pages])[1] == {
        long[0]: 30,
        long[1]: 30,
    }


def test_a_line_counts_once_in_each_document_and_few_documents_have_no_shared_lines():
    assert found_in([f"{prose(seed)}\n{FOOTER}\n{FOOTER}" for seed in range(40)])[1] == {FOOTER: 40}
    assert not found_in(PAGES[:19])[1]
    assert not found_in([*PAGES, *map(prose, range(100, 140))])[1]  # half of them


def test_counts_stay_right_while_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(shared_lines, "MOST_LINES", 50)
    shared, found = SharedLines(), 0
    for page in PAGES * 5:
        shared.add(page)
        found = max(found, len(shared.recent))
    assert found <= 50 and shared.found()[FOOTER] == 200


def test_rare_lines_of_the_last_documents_are_forgotten():
    shared = SharedLines()
    for count in (30, 20, 11):
        for number in range(count):
            shared.add(f"of {count}\n" + "in two\n" * (number < 2) + "in one" * (not number))
        shared.forget_rare()
    assert shared.counts == {"of 30": 30, "of 20": 20, "of 11": 11, "in two": 4}
    assert shared.documents == 61 and not shared.recent


CODE = "import os\nimport sys\n\n\ndef {0}(x):\n    if x:\n        return {0}\n    else:\n        pass\n}}\n"
SOUND = {
    "code": [CODE.format(f"f{seed}") + prose(seed) for seed in range(40)],
    "poems": [f"{prose(seed)}\n\nOh no\n\n{prose(seed + 99)}\n\nOh no" for seed in range(40)],
    "tables": [
        f"| Year | Sum |\n| --- | --- |\n| {seed} | {seed * 7} |\n\n{prose(seed)}"
        for seed in range(40)
    ],
    "Markdown": [
        f"# {seed}\n\n## Usage\n\n```\nrun {seed}\n```\n\n## License" for seed in range(40)
    ],
    "chats": [f"User: {seed}?\nAssistant:\n{prose(seed)}" for seed in range(40)],
    "Chinese": [f"第{seed}章\n\n你好\n\n{seed}年的事情" * 3 for seed in range(40)],
}


@pytest.mark.parametrize("texts", SOUND.values(), ids=SOUND)
def test_what_documents_of_a_kind_have_in_common_is_not_found(texts):
    assert found_in(texts)[1] == {}


def test_dropping_changes_nothing_else():
    text = f"{MENU}\n\n\n\n    {FOOTER}\n\ta\n\n- Home\n- Contact\n\n{FOOTER}"
    lines = [MENU, FOOTER]
    assert drop_lines({"text": text}, lines=lines)["text"] == "\n\n\ta\n\n- Home\n- Contact"
    for text in ("", "\n\n\n", prose(1), "a\r\n\r\nb  \n"):
        assert drop_lines({"text": text}, lines=lines)["text"] == text


def test_the_warning_has_figures_and_ends_with_the_transform(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": page}) + "\n" for page in PAGES))
    (warning,) = shared_line_warnings(Data(sources=[Source(path=str(file))]))
    assert "data.sources[0]" in warning and "40 documents" in warning and FOOTER in warning
    remedy = {"name": shared_lines.TRANSFORM, "lines": [FOOTER, MENU]}
    assert not shared_line_warnings(Data(sources=[Source(path=str(file), transforms=[remedy])]))


def test_each_source_of_documents_is_looked_at_whatever_comes_before_it(source, rows_file):
    chats = rows_file(
        "chats", [{"messages": [{"role": "user", "content": "why"}]}], chat="messages"
    )
    sources = [Source(path="memory://nowhere"), source("a", PAGES), chats]
    sources += [source("b", list(map(prose, range(40)))), source("c", PAGES)]
    warnings = shared_line_warnings(Data(sources=sources))
    keys = [warning.partition(": ")[0] for warning in warnings]
    assert keys == ["`data.sources[1]`", "`data.sources[4]`"]


def test_the_system_prompt_of_chats_is_no_menu(rows_file):
    system = {"role": "system", "content": "You are a helpful translator of short texts."}
    rows = [{"messages": [system, {"role": "user", "content": prose(n)}]} for n in range(40)]
    source = rows_file("chats", rows, chat="messages")
    assert shared_line_warnings(Data(sources=[source])) == []


def test_a_sample_ends_at_its_size_and_keeps_what_it_has_read(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        rows = "".join(json.dumps({"text": f"{name} {page}"}) + "\n" for page in PAGES)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    source = Source(path=str(tmp_path))
    assert sample_lines(Data(sources=[source]), source, "k").documents == 3 * len(PAGES)
    monkeypatch.setattr(shared_lines, "SAMPLE_CHARACTERS", 10)
    assert sample_lines(Data(sources=[source]), source, "k").documents == len(PAGES)
