"""Examples token by token, with what is learned of them."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from cpt.data.checking.preview import Example
from cpt.data.examples.encoder import ExampleEncoder
from cpt.data.examples.segments import CONTEXT, LEARNED, ROW, UNWANTED

STYLES = {
    CONTEXT: ("dim", "dim underline"),
    LEARNED: ("black on bright_green", "black on green"),
    UNWANTED: ("black on bright_red", "black on red"),
}
"""Of a token and its neighbour, so that one can be told from the other."""
MEANINGS = {LEARNED: "learned", UNWANTED: "rejected or unwanted"}
MARKS = {CONTEXT: ("", ""), LEARNED: ("[", "]"), UNWANTED: ("{", "}")}
"""Around each token where there are no colours."""


def show_examples(
    console: Console, kept: Sequence[Example], encoder: ExampleEncoder, tokenizer: PreTrainedTokenizerBase, number: int
) -> None:
    """The first examples: each token by itself, in the colour of what becomes of it; in a pipe `[learned]` and
    `{rejected}`."""
    for example in kept[:number]:
        ids, _, segments = encoder.encode_segments([example.text])
        counts = {what: int((segments == segment).sum()) for segment, what in MEANINGS.items()}
        told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        console.print(
            f"{example.where}: {int((segments != ROW).sum()):,} tokens{f', {told}' if told else ''}", markup=False
        )
        line = Text("  ")
        for place, (token, segment) in enumerate(zip(ids.tolist(), segments.tolist(), strict=True)):
            if segment == ROW:
                break
            before, after = ("", "") if console.is_terminal else MARKS[segment]
            line.append(f"{before}{shown(str(tokenizer.decode([token])))}{after}", style=STYLES[segment][place % 2])
        console.print(line)


def shown(token: str) -> str:
    """A token on one line."""
    return token.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
