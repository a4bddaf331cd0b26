"""Render examples with the chat template, and find which characters are learned."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

from cpt.data.readers.documents import first_line
from cpt.data.readers.example import NOT_TOKEN, Example, Message, Words, example_of
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
}
DATE |= {"%H": "00", "%M": "00"}
FILLED_IN = "".join(f"|replace('{code}','{text}')" for code, text in DATE.items())
SAME_DAY = (
    f"{{%- macro strftime_now(format) %}}{{{{ format{FILLED_IN} }}}}{{%- endmacro %}}{{{{ '' }}}}"
)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT, TOOL = "assistant", "tool"
ASKED, ANSWERED, PROBE = (
    "qqq",
    "zzz",
    "qqqzzzqqq",
)  # message contents that do not occur in templates
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
        self.template, self.named_tokens, self.control = (
            template,
            named_tokens,
            control_pattern(control_tokens),
        )
        self.tells_generated = GENERATION.search(template) is not None

    def write(
        self, messages: Sequence[Message], tools: Tools = None, *, prompt: bool = False
    ) -> str:
        return self._render(messages, tools, add_generation_prompt=prompt)[0]

    def opening(self, messages: Sequence[Message], tools: Tools) -> str:
        """The text before the assistant's next words, also for templates without a generation prompt."""
        text = self.write(messages, tools, prompt=True)
        return text if self.frame is None or self.frame.is_prompted else text + self.frame.before

    def generated(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[Span]]:
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def _render(
        self, messages: Sequence[Message], tools: Tools, **options: bool
    ) -> tuple[str, list[Span]]:
        # Imported here, as it takes a second and only chats need it.
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = partial(
            render_jinja_template, chat_template=self.template
        )  # its type hints are too narrow
        try:
            (text,), spans = render(
                [list(messages)], list(tools) if tools else None, **options, **self.named_tokens
            )
        except (TemplateError, TypeError, ValueError) as problem:
            raise Refused(f"the chat template raised: {first_line(problem)}") from problem
        return str(text), [(int(start), int(end)) for start, end in spans[0]] if spans else []

    def turns(self, messages: Sequence[Message], tools: Tools, text: str) -> list[Span]:
        """The spans of the assistant's messages in the text, each with the token that ends it. If control tokens
        surround them, they are found by these, as messages cannot contain control tokens. Otherwise they start at the
        end of the prompt of the messages before, or are searched for."""
        spans = self._turns(messages, tools, text)
        if any(message["role"] == TOOL for message in messages):
            # Gemma 4 writes some tool results inside the assistant's turn.
            probe = [
                {**message, "content": PROBE} if message["role"] == TOOL else message
                for message in messages
            ]
            written = self.write(probe, tools)
            if any(
                PROBE in written[start:end] for start, end in self._turns(probe, tools, written)
            ):
                raise Refused(
                    "the chat template writes a tool's result inside the assistant's turn"
                )
        return spans

    def _turns(self, messages: Sequence[Message], tools: Tools, text: str) -> list[Span]:
        numbers = [
            number for number, message in enumerate(messages) if message["role"] == ASSISTANT
        ]
        if framed := self._framed_turns(text, len(numbers)):
            return framed
        spans, at = list[Span](), 0
        for number in numbers:
            opening, upto = (
                self.opening(messages[:number], tools),
                self.write(messages[: number + 1], tools).rstrip(),
            )
            start, end = self._behind_header(text, len(opening)), len(upto)
            if not (text.startswith(opening) and text.startswith(upto) and at <= start < end):
                start, end = self._found(messages[number], text, opening, upto, at)
            spans.append((start, end))
            at = end
        return spans

    @cached_property
    def frame(self) -> Frame | None:
        """The text around the assistant's words; None if the template rejects a small chat."""
        asked, answered = (
            {"role": "user", "content": ASKED},
            {"role": ASSISTANT, "content": ANSWERED},
        )
        try:
            first, second = self.write([asked]), self.write([asked, answered, asked])
            prompted, whole = (
                self.write([asked], prompt=True),
                self.write([asked, answered, asked, answered]),
            )
        except Refused:
            return None
        at, last = whole.find(ANSWERED), whole.rfind(ANSWERED)
        if (
            at == last
            or not whole.startswith(first)
            or not prompted.startswith(first)
            or not whole.startswith(second)
        ):
            return None
        is_prompted = len(prompted) > len(first)
        befores = [whole[len(first) : at], whole[len(second) : last]]
        befores += [prompted[len(first) :]] if is_prompted else []
        after = commonprefix([whole[at + len(ANSWERED) :], whole[last + len(ANSWERED) :]])
        ends = [found.end() for found in self.control.finditer(after)] or [0]
        return Frame(commonprefix(befores).rstrip(" "), after[: ends[-1]], is_prompted)

    @property
    def turn_end(self) -> str | None:
        """The control token after the assistant's words, such as `<|im_end|>`; None if there is none."""
        found = self.control.search(self.frame.after) if self.frame is not None else None
        return found[0] if found is not None else None

    def _framed_turns(self, text: str, number: int) -> list[Span] | None:
        """Spans by the text around them; None without control tokens, or if not found exactly once per message."""
        opens = self.control.search(self.frame.before) if self.frame is not None else None
        if self.frame is None or opens is None or not self.frame.after:
            return None
        before, after, _ = self.frame
        spans, at = list[Span](), 0
        while (start := text.find(before, at)) >= 0:
            start += len(before)
            end = text.find(after, start)
            if end < 0 or text.find(opens[0], start, end) >= 0:
                return None
            at = end + len(after)
            spans.append((start, at))
        return spans if len(spans) == number else None

    def _behind_header(self, text: str, start: int) -> int:
        """Skip text that some templates write before the assistant's words after tools, but not in the prompt."""
        before = self.frame.before if self.frame is not None else ""
        return (
            start + len(before)
            if self.control.search(before) and text.startswith(before, start)
            else start
        )

    def _found(self, message: Message, text: str, opening: str, upto: str, at: int) -> Span:
        """The content of a message that a template renders differently when others follow. It ends with the text that
        the template wrote after it, or with the control token that follows immediately."""
        words = message["content"] or ""
        content, blanks = words.strip(), words[len(words.rstrip()) :]
        is_opened = text.startswith(opening) and at <= len(opening)
        begin = self._behind_header(text, len(opening)) if is_opened else at
        start = text.find(content, begin) if content else -1
        if start < 0 or not is_opened and text.find(content, start + 1) >= 0:
            raise Refused(
                "the assistant's words cannot be found in the output of the chat template"
            )
        end = start + len(content)
        end += len(
            commonprefix([blanks, text[end:]])
        )  # most templates strip the content; phi and gpt-oss do not
        after = upto[upto.rfind(content) + len(content) :]
        token = self.control.match(text, end)
        ends = [len(tail) for tail in (after, after.lstrip()) if text.startswith(tail, end)]
        return begin if is_opened else start, end + (
            ends[0] if ends else len(token[0]) if token else 0
        )


def control_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Match control tokens, longer ones first, but not escaped ones."""
    return re.compile(
        f"({'|'.join(map(re.escape, sorted(tokens, key=len, reverse=True)))})(?!{NOT_TOKEN})"
    )


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
        self.template = (
            None if template is None else ChatTemplate(template, named_tokens, control_tokens)
        )
        self.form, self.control = form, control_pattern(control_tokens)
        self.write = lru_cache(REMEMBERED)(self._write)

    def _write(self, text: str) -> list[Written]:
        """The texts of an example: the chosen and the rejected one, or the only one."""
        example = example_of(
            self.control.sub(lambda found: f"{found[0][0]}{NOT_TOKEN}{found[0][1:]}", text)
        )
        if example is None:
            raise Refused("not an example any more: a transform changed its parts")
        messages, prompt = example.messages, example.prompt
        if self.form == "preference":
            return self.preference(example)
        if self.form == "unpaired":
            return [self.pair(example, example.completion, only_assistant=False)]
        if self.form == "prompt":
            if prompt is None:
                raise Refused("not a prompt: a plain text or a chat, not a row with columns")
            opening = (
                prompt if isinstance(prompt, str) else self.chats().opening(prompt, example.tools)
            )
            return [Written(opening, is_chat=isinstance(prompt, list), spans=[], learns_end=False)]
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
        chosen, rejected, prompt = example.chosen, example.rejected, example.prompt
        if (
            prompt is None
            and chosen is not None
            and rejected is not None
            and type(chosen) is type(rejected)
        ):
            most = max(0, min(len(chosen), len(rejected)) - 1)  # keep something of both
            same = next((at for at in range(most) if chosen[at] != rejected[at]), most)
            # Most tokenizers encode a blank together with the next word.
            same -= isinstance(chosen, str) and chosen[:same].endswith(" ")
            prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
        example = example._replace(prompt=prompt)
        return [
            self.pair(example, completion, only_assistant=False)
            for completion in (chosen, rejected)
        ]

    def pair(self, example: Example, completion: Words | None, *, only_assistant: bool) -> Written:
        prompt, tools = example.prompt, example.tools
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
            before = sum(message["role"] == ASSISTANT for message in prompt)
            begin = chats.turns(prompt + completion, tools, text)[before][0]
        return Written(text, is_chat=True, spans=[(begin, len(text))])

    def chat(self, messages: list[Message], tools: Tools, first: int) -> Written:
        if all(message["role"] != ASSISTANT for message in messages[first:]):
            raise Refused("no message of the assistant")
        chats, learns_end = self.chats(), messages[-1]["role"] == ASSISTANT
        if chats.tells_generated:
            text, spans = chats.generated(messages, tools)
            begin = len(chats.write(messages[:first], tools)) if first else 0
            spans = [span for span in spans if span[0] >= begin]
        else:
            text = chats.write(messages, tools)
            before = sum(message["role"] == ASSISTANT for message in messages[:first])
            spans = chats.turns(messages, tools, text)[before:]
            ends = {found.end() for found in self.control.finditer(text, *spans[-1])}
            if learns_end and spans[-1][1] not in ends:
                spans[-1] = (
                    spans[-1][0],
                    len(text),
                )  # include blanks, so that everything before the EOS is learned
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


def turn_end(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The id of the token after the assistant's words in the chat template; None without template or token."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template is None:
        return None
    added = tokenizer.added_tokens_decoder.items()
    control = {token.content: number for number, token in added if token.special}
    names = tokenizer.all_special_tokens
    control |= dict(zip(names, tokenizer.all_special_ids, strict=True))
    name = ChatTemplate(template, tokenizer.special_tokens_map, sorted(control)).turn_end
    return None if name is None else control[name]
