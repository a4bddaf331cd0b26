"""The page of `cpt chat --browser`: one prompt, the answers of base and trained model beside each other, as they are
written."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gradio

from cpt.errors import CptError
from cpt.serving.answering import Answers, Sampling, Turn
from cpt.serving.sides import Side

FONT, FONT_MONO = (
    ("system-ui", "sans-serif"),
    ("ui-monospace", "monospace"),
)  # those of the reader's system: nothing to fetch
STYLE = """
.message, .message * { white-space: pre-wrap; overflow-wrap: anywhere; }
.message-markdown-disabled .md { font-family: var(--font-mono); font-size: 0.85rem; }
[id^="side-"] button[aria-label="Clear"] { display: none; }
#problem { color: var(--error-text-color); }
#problem:empty, #problem:has(> :empty) { display: none; }
footer { display: none !important; }
"""
NO_TEMPLATE = "{} no chat template: text is continued, questions are not answered."
BEGIN = "For that, write the beginning of a document, as it would stand in the training text."
ENDED_AT_ONCE = "(the model ended its answer at once)"
ONE_AFTER_THE_OTHER = "answers"  # Gradio's name for a queue


@dataclass(frozen=True)
class About:
    """What stands above and below the answers."""

    title: str
    headline: str | None = None
    examples: Sequence[str] = ()
    as_chat: bool = False
    """How it begins; where there is a template, a switch changes it."""
    system_prompt: str | None = None
    sampling: Sampling = Sampling()


class Stops:
    """An event for each tab that is being answered."""

    def __init__(self) -> None:
        self.events: dict[str | None, threading.Event] = {}

    def begin(self, tab: str | None) -> threading.Event:
        """A new one."""
        self.events[tab] = threading.Event()
        return self.events[tab]

    def stop(self, request: gradio.Request) -> None:
        """Of the tab that asks, or that was closed."""
        if event := self.events.pop(request.session_hash, None):
            event.set()

    def stop_all(self) -> None:
        """Where the server ends."""
        for event in list(self.events.values()):
            event.set()


def build_page(sides: Sequence[Side], about: About, answers: Answers, stops: Stops) -> gradio.Blocks:
    """All of it; nothing on it comes from another machine."""
    with gradio.Blocks(title=about.title, analytics_enabled=False, fill_width=True) as page:
        gradio.Markdown(f"# {about.title}")
        if about.headline:
            gradio.Markdown(about.headline, elem_id="headline")
        gradio.Markdown(told_of_templates(sides), elem_id="notice")
        with gradio.Row():
            talks = [talk_of(side, number, as_chat=about.as_chat) for number, side in enumerate(sides)]
        problem = gradio.Markdown(elem_id="problem")
        what = "Message" if about.as_chat else "Beginning of a text"
        prompt = gradio.Textbox(
            label=what, info="Shift + Enter sends it.", lines=3, max_lines=12, elem_id="prompt", autofocus=True
        )
        with gradio.Row():
            send, stop, retry, clear = (
                gradio.Button(
                    name, variant="primary" if name == "Send" else "secondary", elem_id=name.lower(), min_width=80
                )
                for name in ("Send", "Stop", "Retry", "Clear")
            )
        if about.examples:
            gradio.Examples(
                [[text] for text in about.examples],
                [prompt],
                label="From held-out text of the run",
                elem_id="examples",
            )
        controls = [*controls_of(about.sampling), switch_of(sides, as_chat=about.as_chat)]
        connect(
            page,
            Conversation(sides, about, answers, stops),
            talks,
            prompt,
            problem,
            controls,
            (send, stop, retry, clear),
        )
    return page


def told_of_templates(sides: Sequence[Side]) -> str:
    """What the models take for a prompt, and that a base model does not answer."""
    lacking = [side.title for side in sides if not side.has_template]
    if len(lacking) == len(sides):
        return f"{NO_TEMPLATE.format('These models have' if len(sides) > 1 else 'This model has')} {BEGIN}"
    if lacking:
        return f"{NO_TEMPLATE.format(f'{lacking[0]} has')} It gets the last message alone, chat or not."
    return (
        "There is a chat template, but a model that was trained on text alone has never learned it: it continues"
        f" text. {BEGIN}"
    )


def talk_of(side: Side, number: int, *, as_chat: bool) -> gradio.Chatbot:
    """Where a model's answers stand: those of a chat as Markdown, a text letter by letter."""
    return gradio.Chatbot(
        label=f"{side.title}: {side.name}",
        elem_id=f"side-{number}",
        height=420,
        render_markdown=as_chat,
        layout="panel",
        buttons=["copy"],
        feedback_options=None,
        placeholder="",
        min_width=280,
    )


def controls_of(sampling: Sampling) -> list[gradio.components.Component]:
    """Of the fields of Sampling, in their order."""
    longest, width = max(2048, sampling.max_new_tokens), 160
    with gradio.Row():
        temperature = gradio.Slider(
            0, 2, sampling.temperature, step=0.05, label="Temperature", info="0: the likeliest", min_width=width
        )
        top_p = gradio.Slider(
            0.05, 1, sampling.top_p, step=0.05, label="Top-p", info="The likeliest, of this share", min_width=width
        )
        length = gradio.Slider(
            1, longest, sampling.max_new_tokens, step=1, label="Length", info="Most new tokens", min_width=width
        )
        seed = gradio.Number(
            sampling.seed, precision=0, minimum=0, label="Seed", info="The same gives the same", min_width=width
        )
    return [temperature, top_p, length, seed]


def switch_of(sides: Sequence[Side], *, as_chat: bool) -> gradio.Checkbox:
    """Between text and chat."""
    return gradio.Checkbox(
        as_chat,
        label="Send as a chat",
        info="In the model's chat template, with what was said before; otherwise as a text to go on from.",
        visible=any(side.has_template for side in sides),
        elem_id="as-chat",
    )


@dataclass(frozen=True)
class Conversation:
    """What the buttons do; the turns themselves are held by each tab."""

    sides: Sequence[Side]
    about: About
    answers: Answers
    stops: Stops

    def send(
        self, tab: str | None, text: str, talks: Sequence[list[Turn]], sampling: Sampling, as_chat: bool
    ) -> Iterator[tuple[list[list[Turn]], str]]:
        """The turns of each side as they grow, and what went wrong."""
        stopped, system_prompt = self.stops.begin(tab), self.about.system_prompt
        shown = [[*turns, {"role": "user", "content": text}] for turns in talks]
        asked = [[*answered(turns), {"role": "user", "content": text}] for turns in talks]
        before = [list(turns) for turns in shown]
        yield shown, ""
        try:
            for number, side in enumerate(self.sides):
                answer = ""
                for answer in self.answers.stream(
                    side, asked[number], sampling, stopped, as_chat=as_chat, system_prompt=system_prompt
                ):
                    shown[number] = [*before[number], {"role": "assistant", "content": answer}]
                    yield shown, ""
                if stopped.is_set():
                    break
                if not answer:
                    shown[number] = [*before[number], {"role": "assistant", "content": ENDED_AT_ONCE}]
                    yield shown, ""
        except CptError as problem:
            yield shown, str(problem)


def connect(
    page: gradio.Blocks,
    conversation: Conversation,
    talks: list[gradio.Chatbot],
    prompt: gradio.Textbox,
    problem: gradio.Markdown,
    controls: list[gradio.components.Component],
    buttons: tuple[gradio.Button, ...],
) -> None:
    """Buttons to functions."""
    send, stop, retry, clear = buttons
    seed = controls[3]

    def ask(
        text: str, turns: Sequence[list[Any]], values: Sequence[Any], tab: str | None
    ) -> Iterator[tuple[list[list[Turn]], str]]:
        if not text:
            yield [plain(one) for one in turns], "There is nothing to send yet: write something above."
            return
        temperature, top_p, length, number, as_chat = values
        sampling = Sampling(float(temperature), float(top_p), int(length), int(number or 0))
        yield from conversation.send(tab, text, [plain(one) for one in turns], sampling, bool(as_chat))

    def on_send(request: gradio.Request, text: str, *rest: Any) -> Iterator[tuple[Any, ...]]:
        for shown, what in ask(text, rest[: len(talks)], rest[len(talks) :], request.session_hash):
            yield (*map(in_parts, shown), what, "" if not what else text)

    def on_retry(request: gradio.Request, *rest: Any) -> Iterator[tuple[Any, ...]]:
        before, text = without_last([plain(one) for one in rest[: len(talks)]])
        *values, number, as_chat = rest[len(talks) :]
        number = int(number or 0) + 1  # the same seed would give the same answers
        for shown, what in ask(text, before, [*values, number, as_chat], request.session_hash):
            yield (*map(in_parts, shown), what, number)

    queued: dict[str, Any] = {
        "concurrency_limit": 1,
        "concurrency_id": ONE_AFTER_THE_OTHER,
        "show_progress": "minimal",
    }
    outputs = [*talks, problem]
    for event in (send.click, prompt.submit):
        event(on_send, [prompt, *talks, *controls], [*outputs, prompt], api_name="send", **queued)
    retry.click(on_retry, [*talks, *controls], [*outputs, seed], api_name="retry", **queued)
    stop.click(conversation.stops.stop, None, None, queue=False, api_name="stop")
    nothing: Callable[[], tuple[Any, ...]] = lambda: (*([] for _ in talks), "", "")  # noqa: E731
    clear.click(conversation.stops.stop, None, None, queue=False, api_visibility="private").then(
        nothing, None, [*outputs, prompt], queue=False, api_name="clear"
    )
    page.unload(conversation.stops.stop)


def plain(turns: Sequence[Any]) -> list[Turn]:
    """Role and text of each turn: Gradio gives the text as parts."""
    return [{"role": turn["role"], "content": text_of(turn["content"])} for turn in turns]


def in_parts(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """As Gradio gives them: a bare string would lose its indentation and the line breaks at its ends."""
    return [{"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]


def text_of(content: Any) -> str:
    """Of a turn's content."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def answered(turns: Sequence[Turn]) -> list[Turn]:
    """Without prompts that were stopped before an answer began: templates want the roles in turn. What the model did
    not say is no part."""
    following = [*(turn["role"] for turn in turns[1:]), "user"]
    said = [turn if turn["content"] != ENDED_AT_ONCE else turn | {"content": ""} for turn in turns]
    return [turn for turn, after in zip(said, following, strict=False) if "assistant" in (turn["role"], after)]


def without_last(talks: Sequence[list[Turn]]) -> tuple[list[list[Turn]], str]:
    """The turns before the last prompt, and that prompt; empty where there was none."""
    cut = [max((n for n, turn in enumerate(turns) if turn["role"] == "user"), default=0) for turns in talks]
    texts = [turns[place]["content"] for turns, place in zip(talks, cut, strict=True) if turns]
    return [turns[:place] for turns, place in zip(talks, cut, strict=True)], texts[0] if texts else ""
