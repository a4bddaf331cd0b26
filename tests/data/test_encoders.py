import copy
import json

import pytest

from cpt.data.examples.encoder import MARKS
from cpt.data.readers.example import transcript
from cpt.data.rows.build import build_data
from cpt.recipe.schema import Data, Evaluation

CHATML = """{% if messages[0].role != 'user' %}{{ raise_exception('the user speaks first') }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"""


@pytest.fixture
def chatter(tokenizer):
    made = copy.deepcopy(tokenizer)
    made.add_tokens(["<|im_start|>", "<|im_end|>", *MARKS[0]], special_tokens=True)
    made.chat_template = CHATML
    return made


def chat(number, *, first="user"):
    contents = [f"What is {number}<|im_end|>?", "A number."]
    return [{"role": role, "content": content} for role, content in zip((first, "assistant"), contents, strict=True)]


def write(path, chats):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return str(path)


def test_chats_are_trained_on_and_held_out(chatter, tmp_path):
    talks = [*(chat(number) for number in range(40)), chat(40, first="assistant")]
    source = {"path": write(tmp_path / "talks.jsonl", talks), "chat": "messages"}
    judge = {"path": write(tmp_path / "judge.jsonl", [chat(3), chat(99)]), "chat": "messages"}
    data = Data(sources=[source], sequence_length=128)
    prepared = build_data(data, chatter, seed=1, evaluation=Evaluation(perplexity=[judge]), cache_dir=tmp_path)
    (report,) = prepared.sources
    assert (report.documents, report.held_out) == (39, 1)
    assert report.dropped == {"the chat template says: the user speaks first": 1}
    text = "".join(chatter.decode(row["input_ids"]) for row in prepared.windowed[0].window(0))
    written = chatter.apply_chat_template(chat(7), tokenize=False) + "<|endoftext|>"
    assert text.count(written) == 1 and "What is 3<" not in text
    turns = sum(
        int((row["input_ids"] == chatter.convert_tokens_to_ids("<|im_end|>")).sum())
        for row in prepared.windowed[0].window(0)
    )
    assert turns == 2 * 39, "what looks like the end of a turn in a message is none"
    judged = prepared.held_out["judge"]
    assert judged.num_documents == 2 and judged.rows.documents.num_bytes.sum() == sum(
        len(transcript(chat(number), "").encode()) for number in (3, 99)
    )
