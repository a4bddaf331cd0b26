"""What does quantising cost? Bits per byte and divergence on the run's held-out text."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from cpt.errors import CptError, DataError
from cpt.evaluation.judged_sets import judges_of_recipe, open_judged_sets
from cpt.export.proof import TEXT
from cpt.export.trained import Trained
from cpt.models.config import value_of
from cpt.recipe.schema import Recipe

WINDOW = 256  # tokens that are read together
MOST_TOKENS = 8192
MOST_LOGITS = 2**28  # 1 GiB of them in fp32
BEGINNING = 4000  # characters read of a document, so that one long document does not decide


@dataclass(frozen=True)
class JudgedText:
    """Pieces of text as tokens.

    Attributes:
        where: what the text is, for the report.
        num_bytes: UTF-8 bytes of the text of the predicted tokens.
    """

    where: str
    windows: list[list[int]]
    num_bytes: int

    @property
    def num_predicted(self) -> int:
        """Tokens with a token before them."""
        return sum(len(window) - 1 for window in self.windows)


def judged_text(
    trained: Trained, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, file: Path | None
) -> JudgedText:
    """The user's file (`--text`), else the documents that the run held out, else our own passage."""
    if file is not None:
        try:
            return in_windows(f"the text of {file}", [file.read_text(encoding="utf-8")], tokenizer, config)
        except (OSError, UnicodeDecodeError) as problem:
            raise DataError(f"--text {file} cannot be read: {problem}") from problem
    if trained.run is not None and trained.recipe is not None:
        with suppress(CptError):  # the data may not be on this machine; the report names the text that was used
            documents = held_out_documents(trained.recipe, tokenizer)
            return in_windows(f"documents that the run `{trained.recipe.name}` held out", documents, tokenizer, config)
    return in_windows(
        "our own passage, which is short: --text FILE gives a page of your domain", [TEXT], tokenizer, config
    )


def held_out_documents(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """One of every set in turn, so that each set counts."""
    texts = [judged.texts() for judged in open_judged_sets(judges_of_recipe(recipe), tokenizer).values()]
    while texts:
        for one in list(texts):
            if (document := next(one, None)) is None:
                texts.remove(one)
            else:
                yield document.text


def in_windows(
    where: str, documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> JudgedText:
    """Beginnings of documents in windows of tokens, until there are enough."""
    length = min(WINDOW, value_of(config, "max_position_embeddings") or WINDOW)
    left = min(MOST_TOKENS, MOST_LOGITS // value_of(config, "vocab_size"))
    windows: list[list[int]] = []
    num_bytes = 0
    for document in documents:
        ids = tokenizer(document[:BEGINNING], add_special_tokens=False)["input_ids"][:left]
        for start in range(0, len(ids), length):
            window = ids[start : start + length]
            if len(window) > 1:
                windows.append(window)
                num_bytes += len(str(tokenizer.decode(window[1:])).encode())
                left -= len(window)
        if left < 2:
            break
    if not windows:
        raise DataError(f"{where}: fewer than two tokens. Give a page of text: --text FILE")
    return JudgedText(where, windows, max(1, num_bytes))


@dataclass(frozen=True)
class QuantizationCost:
    """A quantised model compared with the unquantised one, on the same text.

    Attributes:
        before, after: bits per byte.
        divergence: mean Kullback-Leibler divergence of the quantised model's probabilities, in nats a token.
        agreement: share of the tokens with the same most probable successor.
    """

    before: float
    after: float
    divergence: float
    agreement: float

    @property
    def rise(self) -> float:
        """As a share of the unquantised model's bits per byte."""
        return self.after / self.before - 1

    def __str__(self) -> str:
        return (
            f"{self.before:.4f} -> {self.after:.4f} bits per byte ({self.rise:+.2%}); mean KL divergence"
            f" {self.divergence:.2g} nats a token, same first choice for {self.agreement:.1%} of the tokens"
        )


def cost(before: Sequence[torch.Tensor], after: nn.Module, text: JudgedText) -> QuantizationCost:
    """Compare two models window by window.

    Args:
        before: the unquantised model's logits, [T, V] a window.
        after: the quantised model.
    """
    nats = torch.zeros(2, dtype=torch.float64)
    divergence, same = 0.0, 0
    for window, logits in zip(text.windows, before, strict=True):
        targets = torch.tensor(window[1:])
        old, new = logits[:-1].log_softmax(-1), logits_of_ids(after, window)[:-1].log_softmax(-1)
        nats += torch.tensor(
            [F.nll_loss(one, targets, reduction="sum").item() for one in (old, new)], dtype=torch.float64
        )
        divergence += F.kl_div(new, old, reduction="sum", log_target=True).item()
        same += int((old.argmax(-1) == new.argmax(-1)).sum())
    tokens = text.num_predicted
    old_bits, new_bits = (nats / math.log(2) / text.num_bytes).tolist()
    return QuantizationCost(old_bits, new_bits, divergence / tokens, same / tokens)


def logits_of_ids(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """[T, V] in fp32, on the CPU."""
    device = next(model.parameters()).device
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0]
    return logits.float().cpu()
