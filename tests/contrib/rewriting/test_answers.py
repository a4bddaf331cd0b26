"""Which part of an answer is text."""

import json

import pytest
from contrib.rewriting.test_endpoint import Server, completion

from cpt.contrib.rewriting.answers import clean
from cpt.contrib.rewriting.model import Answer

TEXT = "The harbour keeps a ledger of tides. The ferry crew writes it twice a day."
SOURCE = "tides are noted twice daily by the crew in the harbour's ledger"
THOUGHTS = [
    "<think>SECRET</think>\n" + TEXT,
    "SECRET, and more.\n</think>\n\n" + TEXT,
    "SECRET</think>" + TEXT,
    "<think>\n\n</think>\n\n" + TEXT,
    "<thinking>SECRET</thinking>" + TEXT,
    "<thought>SECRET</thought>\n" + TEXT,
    "<think>SECRET <b>x</b></think>\n" + TEXT + "\n",
    "[THINK]SECRET[/THINK]" + TEXT,
    "<seed:think>SECRET</seed:think>" + TEXT,
    "<|channel|>analysis<|message|>SECRET<|end|><|start|>assistant<|channel|>final<|message|>"
    + TEXT,
    "SECRET<|end|><|start|>assistant<|channel|>final<|message|>" + TEXT + "<|return|>",
    "<|channel>thought\nSECRET<channel|>" + TEXT,
    "analysisThe user SECRETassistantfinal" + TEXT,
]
ONLY_THOUGHTS = [
    "<think>SECRET",
    "<think>SECRET</think>",
    "<|channel|>analysis<|message|>SECRET",
    "SECRET\n</think>",
]
FRAMED = [
    "Sure! Here is the rewritten text:\n\n"
    + TEXT
    + "\n\nLet me know if you would like any changes!",
    "Sure! Here is the rewritten text: " + TEXT,
    "Here's the text in clear prose:\n\n" + TEXT,
    "Certainly!\n\n" + TEXT + "\n\nI hope this helps!",
    "Here are the questions and answers based on the text:\n\n" + TEXT,
    "Natürlich! Hier ist der umgeschriebene Text:\n\n" + TEXT,
    "Voici le texte réécrit :\n\n" + TEXT,
    "¡Claro! Aquí tienes el texto reescrito:\n\n" + TEXT,
    "Конечно! Вот переписанный текст:\n\n" + TEXT,
    "当然！以下是改写后的文本：\n\n" + TEXT,
    "```markdown\n" + TEXT + "\n```",
]
REFUSALS = [
    "I'm sorry, but I can't help with that request. If you have another question, please let me know.",
    "I’m sorry, but I can’t assist with that.",
    "I cannot provide information about this.",
    "I'm unable to rewrite this text.",
    "As an AI language model, I do not rewrite such content.",
    "Es tut mir leid, aber ich kann dir dabei nicht helfen.",
    "Je suis désolé, mais je ne peux pas vous aider.",
    "Lo siento, pero no puedo ayudarte con eso.",
    "Извините, но я не могу помочь с этим.",
    "很抱歉，我无法提供帮助。",
]
SOUND = [
    "I'm sorry, but I can't come to the wedding, wrote the captain to his brother in May.",
    "Sorry is a hard word, and the minister never said it to the people of Oberau.",
    "\"I'm sorry, but I can't help you,\" said the clerk, and closed the window.",
    "I cannot help thinking that the mill was burnt on purpose.",
    "Here is where the river bends: on its bank stands the mill.",
    "Here is the text of the oath:\n\nI swear to keep the light.",
    "Here are three mills: one in Oberau, one in Linden and one at the lake.",
    "Of course the mill burnt down in 1871, as everyone in the village knew.",
    "Sure of their victory, the crew went home.",
    "The tag `<think>` begins the thoughts of a model, and `</think>` ends them.",
    "Models write <think> and </think> around their thoughts.",
    "Analysis of the assistant's final report took a year.",
    "```python\nprint('mill')\n```",
    "Example:\n\n```\n<think>one</think>\n```\n\nThat is all.",
    "Lass das Licht an, rief der Wärter. Es tut mir leid, ich kann heute nicht kommen.",
    "Je suis désolé, je ne peux pas venir demain, écrivit-il.",
    "对不起，我不能来参加婚礼。",
    "Please let me know. These were the last words of his letter.\n\nNobody answered it.",
]


@pytest.mark.parametrize("answer", THOUGHTS)
def test_thoughts_are_removed_and_named(answer):
    cleaned = clean(Answer(answer, False), SOURCE)
    assert cleaned.text == TEXT and cleaned.flaw is None
    assert cleaned.removed in (("thoughts in tags",), ("thoughts in channels",))


@pytest.mark.parametrize("answer", ONLY_THOUGHTS)
def test_an_answer_with_thoughts_alone_has_no_text(answer):
    assert clean(Answer(answer, True), SOURCE).flaw == "only thoughts"


@pytest.mark.parametrize("answer", FRAMED)
def test_framing_is_removed(answer):
    cleaned = clean(Answer(answer, False), SOURCE)
    assert (cleaned.text, cleaned.removed) == (TEXT, ("framing sentences",))


@pytest.mark.parametrize(
    "answer", ["Sure! I'd be happy to help with it. " + TEXT, "Please provide the text."]
)
def test_an_answer_about_the_task_is_dropped(answer):
    assert clean(Answer(answer, False), SOURCE).flaw == "framing sentences without a text"


@pytest.mark.parametrize("answer", REFUSALS)
def test_refusals_are_found(answer):
    assert clean(Answer(answer, False), SOURCE).flaw == "refusal"


@pytest.mark.parametrize("text", SOUND)
def test_sound_texts_stay_as_they_are(text):
    assert clean(Answer(text, False), SOURCE) == Answer(text, False)


def test_a_phrase_of_the_source_is_text():
    letter = "I'm sorry, but I can't help with that.\n\nThe clerk signed it.\n\nLet me know if you need more!"
    source = "He wrote: sorry, no help.\nLet me know if you need more"
    assert clean(Answer(letter, False), source).text == letter


@pytest.fixture
def rewrite_texts(cpt, tmp_path):
    """`rewrite_texts(respond, texts)`: the exit code, what was printed, and the rows."""

    def run(respond, texts):
        (tmp_path / "corpus.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
        server = Server(respond)
        words = [
            "data",
            "rewrite",
            tmp_path / "corpus.jsonl",
            "--endpoint",
            server.url,
            "--model",
            "small",
        ]
        code, said = cpt(*words, "--styles", "easy", "--output", tmp_path / "out")
        files = sorted((tmp_path / "out").glob("*.jsonl"))
        return (
            code,
            said,
            [json.loads(line) for file in files for line in file.read_text().splitlines()],
        )

    return run


def test_equal_answers_to_different_texts_are_dropped_but_the_first(rewrite_texts):
    texts = [f"Report {number} of the mill." for number in range(5)]
    code, said, rows = rewrite_texts(
        lambda number, asked: (200, completion(TEXT)), [*texts, texts[0]]
    )
    assert code == 0 and {row["source_text_hash"] for row in rows} == {rows[0]["source_text_hash"]}
    assert "dropped: equal to the answer to another text" in said


def test_answers_that_differ_in_any_language_are_kept(rewrite_texts):
    answers = [
        "Das ist der Bericht über die Mühle am Fluss, Nummer ",
        "这是关于奥伯劳磨坊一八七一年火灾的报告，由村里的渡船工人每晚写在港口的账本上，编号是第",
        "The report tells how the mill at the river burnt down in the year 18",
        "Отчёт о мельнице, сгоревшей у реки в старой деревне, номер ",
    ]
    texts = [f"Report {number}." for number in range(8)]
    code, _, rows = rewrite_texts(lambda n, asked: (200, completion(f"{answers[n % 4]}{n}")), texts)
    assert code == 0 and len(rows) == 8


def test_a_run_that_keeps_nothing_fails_with_the_reasons(rewrite_texts):
    def respond(number, asked):
        return 200, completion(REFUSALS[0] if number % 3 else "<think>on and on", "stop")

    code, said, rows = rewrite_texts(respond, [f"Report {number}." for number in range(6)])
    assert code == 2 and not rows
    assert "refusal (4), only thoughts (2)" in said and "at most 32 calls" in said
