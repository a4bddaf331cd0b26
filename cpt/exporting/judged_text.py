"""The text that a quantised model is judged on: the run's own held-out documents, or the user's file, or our passage."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from cpt.checkpoints.proof import TEXT
from cpt.errors import CptError, DataError
from cpt.evaluation.judged_sets import judges_of_recipe, open_judged_sets
from cpt.models.config import value_of
from cpt.recipe.schema import Recipe

WINDOW = 256  # tokens that are read together
MOST_TOKENS = 8192
MOST_LOGITS = 2**28  # 1 GiB of them in fp32
DOCUMENTS_A_SET = 64
BEGINNING = 4000  # characters that are read of a document, so that one long document is not the whole judgement


@dataclass(frozen=True)
class JudgedText:
    """Pieces of text as tokens.

    Attributes:
        where: what the text is, in words.
        num_bytes: of the text that the predicted tokens stand for, in UTF-8.
    """

    where: str
    windows: list[list[int]]
    num_bytes: int

    @property
    def num_predicted(self) -> int:
        """Tokens that have a token before them."""
        return sum(len(window) - 1 for window in self.windows)


def judged_text(recipe: Recipe | None, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, file: Path | None) -> JudgedText:
    """The best text there is.

    Args:
        recipe: of the run; its `evaluation.perplexity` files are read again.
        file: `--text`, which comes before all.

    Raises:
        DataError: the file cannot be read, or is too short.
    """
    if file is not None:
        try:
            return in_windows(f"the text of {file}", [file.read_text(encoding="utf-8")], tokenizer, config)
        except (OSError, UnicodeDecodeError) as problem:
            raise DataError(f"--text {file} cannot be read: {problem}") from problem
    if recipe is not None and recipe.evaluation.perplexity:
        try:
            documents = list(islice(held_out_documents(recipe, tokenizer), 1000))
            return in_windows(f"held-out documents of the run `{recipe.name}`", documents, tokenizer, config)
        except CptError:
            pass  # the files have moved since: what is said in the end names the text that was taken instead
    return in_windows("our own passage, which is short: --text FILE gives a page of your domain", [TEXT], tokenizer, config)


def held_out_documents(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Of every set that is a file of its own, in turn, so that none is crowded out."""
    evaluation = recipe.evaluation.model_copy(update={"held_out_share": None})
    judges = replace(judges_of_recipe(recipe), evaluation=evaluation)
    texts = [islice(one.texts(), DOCUMENTS_A_SET) for one in open_judged_sets(judges, tokenizer).values()]
    while texts:
        for one in list(texts):
            document = next(one, None)
            if document is None:
                texts.remove(one)
            else:
                yield document.text


def in_windows(where: str, documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> JudgedText:
    """Beginnings of documents in windows of tokens, until there are enough.

    Raises:
        DataError: there is too little text to tell anything.
    """
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
