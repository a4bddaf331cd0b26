"""Render examples with the chat template, and find which characters are learned."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

from cpt.data.readers.documents import first_line
from cpt.data.readers.example import NOT_TOKEN, Example, Message, Words, example_of
from cpt.data.store.tokenization import control_tokens_of, default_template
from cpt.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Some templates write the current date. Stored tokens must not change from day to day, so these templates always get
# 26 July 2024, the fallback date of Llama 3's template.
DATE = {
    "%Y": "2024",
    "%y": "24",
    "%m": "07",
    "%d": "26",
    "%B": "July",
    "%b": "Jul",
    "%A": "Friday",
    "%a": "Fri",
    "%H": "00",
    "%M": "00",
}
FILLED_IN = "".join(f"|replace('{code}','{text}')" for code, text in DATE.items())
SAME_DAY = (
    f"{{%- macro strftime_now(format) %}}{{{{ format{FILLED_IN} }}}}{{%- endmacro %}}{{{{ '' }}}}"
)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"
TOOL = "tool"
# message contents that do not occur in templates
QUESTION = "qqq"
ANSWER = "zzz"
PROBE = "qqqzzzqqq"
Tools = Sequence[Mapping[str, Any]] | None
Span = tuple[int, int]
REMEMBERED = 4096  # texts: filters check a batch of documents before it is encoded


class Refused(Exception):  # noqa: N818 -- becomes the reason to drop a document
    """The reason why a text cannot be rendered as a chat."""


class Frame(NamedTuple):
    before: str
    after: str
    is_prompted: bool  # whether `add_generation_prompt` writes `before`


class ChatTemplate:
    """A tokenizer's chat template; control tokens in the text of messages are escaped by NOT_TOKEN."""

    def __init__(
        self, template: str, named_tokens: Mapping[str, Any], control_tokens: Sequence[str]
    ) -> None:
        self.template = template
        self.named_tokens = named_tokens
        self.control = control_pattern(control_tokens)
        self.tells_generated = GENERATION.search(template) is not None

    def write(
        self, messages: Sequence[Message], tools: Tools = None, *, prompt: bool = False
    ) -> str:
        text, _ = self._render(messages, tools, add_generation_prompt=prompt)
        return text

    def opening(self, messages: Sequence[Message], tools: Tools) -> str:
        """The text before the assistant's next words, also for templates without a generation prompt."""
        text = self.write(messages, tools, prompt=True)
        if self.frame is None or self.frame.is_prompted:
            return text
        return text + self.frame.before

    def generated(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[Span]]:
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def _render(
        self, messages: Sequence[Message], tools: Tools, **options: bool
    ) -> tuple[str, list[Span]]:
        # Imported here, as it takes a second and only chats need it.
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # its type hints are too narrow
        try:
            (text,), spans_of_texts = render(
                [list(messages)],
                list(tools) if tools else None,
                chat_template=self.template,
                **options,
                **self.named_tokens,
            )
        except (TemplateError, TypeError, ValueError) as problem:
            raise Refused(f"the chat template raised: {first_line(problem)}") from problem
        spans = spans_of_texts[0] if spans_of_texts else []
        return str(text), [(int(start), int(end)) for start, end in spans]

    def turns(self, messages: Sequence[Message], tools: Tools, text: str) -> list[Span]:
        """The spans of the assistant's messages in the text, each with the token that ends it. If control tokens
        surround them, they are found by these, as messages cannot contain control tokens. Otherwise they start at the
        end of the prompt of the messages before, or are searched for."""
        spans = self._turns(messages, tools, text)
        if any(message["role"] == TOOL for message in messages):
            self._refuse_tools_in_turns(messages, tools)
        return spans

    def _refuse_tools_in_turns(self, messages: Sequence[Message], tools: Tools) -> None:
        """Gemma 4 writes some tool results inside the assistant's turn."""
        probe = list(messages)
        for number, message in enumerate(messages):
            if message["role"] == TOOL:
                probe[number] = {**message, "content": PROBE}
        text = self.write(probe, tools)
        for start, end in self._turns(probe, tools, text):
            if PROBE in text[start:end]:
                raise Refused(
                    "the chat template writes a tool's result inside the assistant's turn"
                )

    def _turns(self, messages: Sequence[Message], tools: Tools, text: str) -> list[Span]:
        numbers = []
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                numbers.append(number)
        framed = self._framed_turns(text, len(numbers))
        if framed:
            return framed
        spans: list[Span] = []
        end_before = 0
        for number in numbers:
            opening = self.opening(messages[:number], tools)
            closed = self.write(messages[: number + 1], tools).rstrip()
            start = self._skip_header(text, len(opening))
            end = len(closed)
            is_continued = text.startswith(opening) and text.startswith(closed)
            if not (is_continued and end_before <= start < end):
                start, end = self._search(messages[number], text, opening, closed, end_before)
            spans.append((start, end))
            end_before = end
        return spans

    @cached_property
    def frame(self) -> Frame | None:
        """The text around the assistant's words; None if the template rejects a small chat."""
        question = {"role": "user", "content": QUESTION}
        answer = {"role": ASSISTANT, "content": ANSWER}
        try:
            before_first = self.write([question])
            before_last = self.write([question, answer, question])
            prompted = self.write([question], prompt=True)
            text = self.write([question, answer, question, answer])
        except Refused:
            return None
        first = text.find(ANSWER)
        last = text.rfind(ANSWER)
        if first == last or not prompted.startswith(before_first):
            return None
        if not text.startswith(before_first) or not text.startswith(before_last):
            return None
        is_prompted = len(prompted) > len(before_first)
        headers = [text[len(before_first) : first], text[len(before_last) : last]]
        if is_prompted:
            headers.append(prompted[len(before_first) :])
        after = commonprefix([text[first + len(ANSWER) :], text[last + len(ANSWER) :]])
        end = 0  # of the last control token
        for control in self.control.finditer(after):
            end = control.end()
        return Frame(
            before=commonprefix(headers).rstrip(" "), after=after[:end], is_prompted=is_prompted
        )

    @property
    def turn_end(self) -> str | None:
        """The control token after the assistant's words, such as `<|im_end|>`; None if there is none."""
        if self.frame is None:
            return None
        control = self.control.search(self.frame.after)
        return None if control is None else control[0]

    def _framed_turns(self, text: str, count: int) -> list[Span] | None:
        """Spans by the text around them; None without control tokens, or if there are not as many as messages."""
        if self.frame is None or not self.frame.after:
            return None
        before, after, _ = self.frame
        opening_control = self.control.search(before)
        if opening_control is None:
            return None
        spans: list[Span] = []
        header = text.find(before)
        while header >= 0:
            start = header + len(before)
            after_words = text.find(after, start)
            if after_words < 0 or text.find(opening_control[0], start, after_words) >= 0:
                return None
            end = after_words + len(after)
            spans.append((start, end))
            header = text.find(before, end)
        return spans if len(spans) == count else None

    def _skip_header(self, text: str, start: int) -> int:
        """Skip text that some templates write before the assistant's words after tools, but not in the prompt."""
        header = self.frame.before if self.frame is not None else ""
        if self.control.search(header) and text.startswith(header, start):
            return start + len(header)
        return start

    def _search(
        self, message: Message, text: str, opening: str, closed: str, end_before: int
    ) -> Span:
        """The content of a message that a template renders differently when others follow. It ends with the text that
        the template wrote after it, or with the control token that follows immediately.

        Args:
            opening: the text before the message, without those that follow.
            closed: the text up to the end of the message, without those that follow.
            end_before: of the assistant's message before.
        """
        content = message["content"] or ""
        stripped = content.strip()
        is_opened = text.startswith(opening) and end_before <= len(opening)
        begin = self._skip_header(text, len(opening)) if is_opened else end_before
        start = text.find(stripped, begin) if stripped else -1
        if start < 0 or not is_opened and text.find(stripped, start + 1) >= 0:
            raise Refused(
                "the assistant's words cannot be found in the output of the chat template"
            )
        end = start + len(stripped)
        # Most templates strip the content; phi and gpt-oss do not.
        blanks = content[len(content.rstrip()) :]
        end += len(commonprefix([blanks, text[end:]]))
        end += self._length_after(text, end, closed[closed.rfind(stripped) + len(stripped) :])
        return (begin if is_opened else start), end

    def _length_after(self, text: str, end: int, written_after: str) -> int:
        """The characters at the end of the assistant's words that belong to them."""
        for tail in (written_after, written_after.lstrip()):
            if text.startswith(tail, end):
                return len(tail)
        control = self.control.match(text, end)
        return 0 if control is None else len(control[0])


def control_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Match control tokens, longer ones first, but not escaped ones."""
    alternatives = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    return re.compile(f"({alternatives})(?!{NOT_TOKEN})")


class Written(NamedTuple):
    text: str
    is_chat: bool  # rendered by the chat template: control tokens become special tokens
    spans: list[Span]
    by_overlap: bool = False  # learn tokens with any character in a span, as in transformers
    learns_end: bool = True


class ExampleWriter:
    def __init__(
        self,
        form: str,
        template: str | None,
        named_tokens: Mapping[str, Any],
        control_tokens: Sequence[str],
    ) -> None:
        self.template = None
        if template is not None:
            self.template = ChatTemplate(template, named_tokens, control_tokens)
        self.form = form
        self.control = control_pattern(control_tokens)
        self.write = lru_cache(REMEMBERED)(self._write)

    def _write(self, text: str) -> list[Written]:
        """The texts of an example: the chosen and the rejected one, or the only one."""
        example = example_of(self.control.sub(escape, text))
        if example is None:
            raise Refused("not an example any more: a transform changed its parts")
        if self.form == "preference":
            return self.preference(example)
        if self.form == "unpaired":
            return [self.pair(example, example.completion, only_assistant=False)]
        if self.form == "prompt":
            return [self.prompt(example)]
        messages = example.messages
        if self.form == "document":
            if not isinstance(messages, list):
                raise Refused(
                    "not a chat: a file without columns, or a transform changed its lines"
                )
            return [Written(self.chats().write(messages, example.tools), is_chat=True, spans=[])]
        # Learn the assistant's words of a conversation, a completion, or all of a plain text.
        if isinstance(messages, str):
            return [Written(messages, is_chat=False, spans=[(0, len(messages))])]
        if messages is not None:
            return [self.chat(messages, example.tools, 0)]
        return [self.pair(example, example.completion, only_assistant=True)]

    def preference(self, example: Example) -> list[Written]:
        chosen = example.chosen
        rejected = example.rejected
        if (
            example.prompt is None
            and chosen is not None
            and rejected is not None
            and type(chosen) is type(rejected)
        ):
            common = common_length(chosen, rejected)
            example = example._replace(prompt=chosen[:common])
            chosen = chosen[common:]
            rejected = rejected[common:]
        return [
            self.pair(example, chosen, only_assistant=False),
            self.pair(example, rejected, only_assistant=False),
        ]

    def prompt(self, example: Example) -> Written:
        prompt = example.prompt
        if prompt is None:
            raise Refused("not a prompt: a plain text or a chat, not a row with columns")
        if isinstance(prompt, str):
            return Written(prompt, is_chat=False, spans=[], learns_end=False)
        opening = self.chats().opening(prompt, example.tools)
        return Written(opening, is_chat=True, spans=[], learns_end=False)

    def pair(self, example: Example, completion: Words | None, *, only_assistant: bool) -> Written:
        prompt = example.prompt
        tools = example.tools
        if isinstance(prompt, str) and isinstance(completion, str):
            return Written(
                prompt + completion,
                is_chat=False,
                spans=[(len(prompt), len(prompt) + len(completion))],
            )
        if not isinstance(prompt, list) or not isinstance(completion, list):
            raise Refused(
                "not the parts of an example: a plain text or a chat, not a row with columns"
            )
        if only_assistant:
            return self.chat(prompt + completion, tools, len(prompt))
        chats = self.chats()
        text = chats.write(prompt + completion, tools)
        opening = chats.opening(prompt, tools) if prompt else ""
        begin = len(opening)
        if not text.startswith(opening):
            if completion[0]["role"] != ASSISTANT:
                raise Refused("the completion does not begin with the assistant's words")
            turns = chats.turns(prompt + completion, tools, text)
            begin, _ = turns[count_turns(prompt)]
        return Written(text, is_chat=True, spans=[(begin, len(text))])

    def chat(self, messages: list[Message], tools: Tools, first: int) -> Written:
        """A chat of which the assistant's messages are learned, from message `first` on."""
        if not count_turns(messages[first:]):
            raise Refused("no message of the assistant")
        chats = self.chats()
        learns_end = messages[-1]["role"] == ASSISTANT
        if chats.tells_generated:
            text, spans = chats.generated(messages, tools)
            begin = len(chats.write(messages[:first], tools)) if first else 0
            spans = [(start, end) for start, end in spans if start >= begin]
        else:
            text = chats.write(messages, tools)
            spans = chats.turns(messages, tools, text)[count_turns(messages[:first]) :]
            start, end = spans[-1]
            control_ends = {control.end() for control in self.control.finditer(text, start, end)}
            if learns_end and end not in control_ends:
                # Include blanks, so that everything before the EOS is learned.
                spans[-1] = (start, len(text))
        return Written(
            text, is_chat=True, spans=spans, by_overlap=chats.tells_generated, learns_end=learns_end
        )

    def chats(self) -> ChatTemplate:
        if self.template is None:
            raise RecipeError(
                "`tokenizer.path`: the data has messages, but the tokenizer lacks a chat template. Use that of"
                " the model's chat version, or set a template for this one: tokenizer.chat_template = ..."
            )
        return self.template


def escape(control: re.Match[str]) -> str:
    token = control[0]
    return f"{token[0]}{NOT_TOKEN}{token[1:]}"


def common_length(chosen: Words, rejected: Words) -> int:
    """The length of what both begin with, as a prompt; something of each remains."""
    max_common = max(0, min(len(chosen), len(rejected)) - 1)
    common = 0
    while common < max_common and chosen[common] == rejected[common]:
        common += 1
    # Most tokenizers encode a blank together with the next word.
    if isinstance(chosen, str) and chosen[:common].endswith(" "):
        common -= 1
    return common


def count_turns(messages: Sequence[Message]) -> int:
    roles = [message["role"] for message in messages]
    return roles.count(ASSISTANT)


def turn_end(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The id of the token after the assistant's words in the chat template; None without template or token."""
    template = default_template(tokenizer)
    if template is None:
        return None
    control_tokens = control_tokens_of(tokenizer)
    chats = ChatTemplate(template, tokenizer.special_tokens_map, sorted(control_tokens))
    return None if chats.turn_end is None else control_tokens[chats.turn_end]
