"""What the model reads of an example, as text, with the characters that it learns to write."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from cpt.data.examples.chat_template import ASSISTANT, ChatTemplate, Refused, Span, Tools, control_pattern, marked
from cpt.data.readers.chat import Message
from cpt.data.readers.example import Example, Words, example_of
from cpt.errors import RecipeError

REMEMBERED = 4096  # texts: a filter looks at a batch of documents before it is encoded


class Written(NamedTuple):
    text: str
    is_chat: bool
    """Written by the chat template: its control tokens become special tokens."""
    spans: list[Span]
    by_overlap: bool = False
    """A token is learned if any of its characters is, as transformers has it, and not by its first one that is no
    blank."""
    learns_end: bool = True


class ExampleWriter:
    """Writes the texts of examples of a form."""

    def __init__(
        self, form: str, template: str | None, named_tokens: Mapping[str, Any], control_tokens: Sequence[str]
    ) -> None:
        self.template = None if template is None else ChatTemplate(template, named_tokens, control_tokens)
        self.control: re.Pattern[str] = control_pattern(control_tokens)
        ways: dict[str, Callable[[Example], list[Written]]] = {
            "document": self.whole_chat,
            "conversation": self.conversation,
            "preference": self.preference,
            "judged": self.judged,
            "prompt": self.prompt,
        }
        self.write_example = ways[form]
        self.write = lru_cache(REMEMBERED)(self._write)

    def _write(self, text: str) -> list[Written]:
        """The texts of an example: the chosen and the rejected one, or the only one."""
        example = example_of(marked(text, self.control))
        if example is None:
            raise Refused("no example any more: a transform changed its parts")
        return self.write_example(example)

    def whole_chat(self, example: Example) -> list[Written]:
        if not isinstance(example.messages, list):
            raise Refused("no chat (any more): a file without columns, or a transform that changed lines")
        return [Written(self.chats().write(example.messages, example.tools), is_chat=True, spans=[])]

    def conversation(self, example: Example) -> list[Written]:
        """Learned are the assistant's words, a completion, or all of a plain text."""
        if isinstance(example.messages, str):
            return [Written(example.messages, is_chat=False, spans=[(0, len(example.messages))])]
        if example.messages is not None:
            return [self.chat(example.messages, example.tools, 0)]
        return [self.pair(example, example.completion, only_assistant=True)]

    def preference(self, example: Example) -> list[Written]:
        chosen, rejected, prompt = example.chosen, example.rejected, example.prompt
        if prompt is None and isinstance(chosen, list) and isinstance(rejected, list):
            same = common(chosen, rejected)
            prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
        elif prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
            same = common(chosen, rejected)
            same -= chosen[:same].endswith(" ")  # most tokenizers write a blank with the word behind it
            prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
        example = example._replace(prompt=prompt)
        return [self.pair(example, completion, only_assistant=False) for completion in (chosen, rejected)]

    def judged(self, example: Example) -> list[Written]:
        return [self.pair(example, example.completion, only_assistant=False)]

    def prompt(self, example: Example) -> list[Written]:
        if isinstance(example.prompt, list):
            return [
                Written(self.chats().opening(example.prompt, example.tools), is_chat=True, spans=[], learns_end=False)
            ]
        if example.prompt is None:
            raise Refused("no prompt: a plain text or a chat, not a row with columns")
        return [Written(example.prompt, is_chat=False, spans=[], learns_end=False)]

    def pair(self, example: Example, completion: Words | None, *, only_assistant: bool) -> Written:
        prompt = example.prompt
        if isinstance(prompt, str) and isinstance(completion, str):
            return Written(prompt + completion, is_chat=False, spans=[(len(prompt), len(prompt) + len(completion))])
        if isinstance(prompt, list) and isinstance(completion, list):
            if only_assistant:
                return self.chat(prompt + completion, example.tools, len(prompt))
            return self.completion(prompt, completion, example.tools)
        raise Refused("not the parts of an example: a plain text or a chat, not a row with columns")

    def chat(self, messages: list[Message], tools: Tools, first: int) -> Written:
        if all(message["role"] != ASSISTANT for message in messages[first:]):
            raise Refused("no message of the assistant")
        chats = self.chats()
        if chats.tells_generated:
            text, spans = chats.generated(messages, tools)
            begin = len(chats.write(messages[:first], tools)) if first else 0
            spans = [span for span in spans if span[0] >= begin]
        else:
            text = chats.write(messages, tools)
            spans = chats.turns(messages, tools, text)[
                sum(message["role"] == ASSISTANT for message in messages[:first]) :
            ]
            if messages[-1]["role"] == ASSISTANT and not chats.ends_turn(text, spans[-1]):
                spans[-1] = (spans[-1][0], len(text))  # blanks too, so that what stands before the EOS is learned
        return Written(
            text,
            is_chat=True,
            spans=spans,
            by_overlap=chats.tells_generated,
            learns_end=messages[-1]["role"] == ASSISTANT,
        )

    def completion(self, prompt: list[Message], completion: list[Message], tools: Tools) -> Written:
        chats = self.chats()
        text = chats.write(prompt + completion, tools)
        opening = chats.opening(prompt, tools) if prompt else ""
        begin = len(opening)
        if not text.startswith(opening):
            if completion[0]["role"] != ASSISTANT:
                raise Refused("a completion that does not begin with the assistant's words")
            before = sum(message["role"] == ASSISTANT for message in prompt)
            begin = chats.turns(prompt + completion, tools, text)[before][0]
        return Written(text, is_chat=True, spans=[(begin, len(text))])

    def chats(self) -> ChatTemplate:
        if self.template is None:
            raise RecipeError(
                "`tokenizer.path`: the data has messages, and the tokenizer has no chat template. Take the tokenizer"
                " of the model's chat version, or give this one a template: tokenizer.chat_template = ..."
            )
        return self.template


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """How much two texts, or two lists of messages, have in common from the beginning on, so that something is left of
    both."""
    most = max(0, min(len(one), len(other)) - 1)
    return next((at for at in range(most) if one[at] != other[at]), most)
