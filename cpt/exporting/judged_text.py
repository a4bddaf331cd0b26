"""The text that a quantised model is judged on: the run's own held-out documents, or the user's file, or our
passage."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from xxhash import xxh3_64_intdigest

from cpt.cache import default_cache_dir
from cpt.checkpoints.proof import TEXT
from cpt.checkpoints.trained import Trained
from cpt.data.open_sources import keyed_sources, open_source
from cpt.data.readers.documents import apply_policy
from cpt.data.readers.forms import sections_of
from cpt.data.readers.sources import read_piece
from cpt.data.store.shards import keep
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import CptError, DataError
from cpt.evaluation.kept_losses import kept_losses, load_losses
from cpt.models.config import value_of
from cpt.recipe.schema import Data, DocumentSource, Recipe

WINDOW = 256  # tokens that are read together
MOST_TOKENS = 8192
MOST_LOGITS = 2**28  # 1 GiB of them in fp32
DOCUMENTS_A_SET = 64
DOCUMENTS_READ = 20_000  # of a source, to look for those that were held out
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


def judged_text(
    trained: Trained, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, file: Path | None
) -> JudgedText:
    """The best text there is.

    Args:
        trained: whose run held documents out, which are read again from their files.
        file: `--text`, which comes before all.

    Raises:
        DataError: the file cannot be read, or is too short.
    """
    if file is not None:
        try:
            return in_windows(f"the text of {file}", [file.read_text(encoding="utf-8")], tokenizer, config)
        except (OSError, UnicodeDecodeError) as problem:
            raise DataError(f"--text {file} cannot be read: {problem}") from problem
    if trained.run is not None and trained.recipe is not None:
        with suppress(
            CptError
        ):  # the files are elsewhere now: what is said in the end names the text that was taken instead
            documents = held_out_documents(trained.run, trained.recipe, tokenizer)
            return in_windows(f"documents that the run `{trained.recipe.name}` held out", documents, tokenizer, config)
    return in_windows(
        "our own passage, which is short: --text FILE gives a page of your domain", [TEXT], tokenizer, config
    )


def held_out_documents(run: Path, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Of every set in turn, so that none is crowded out; found among the files by the hashes that the run's
    evaluations kept."""
    kept = list(kept_losses(run).values())
    hashes = (
        {number for one in load_losses(kept[-1]).values() for number in one.hashes.tolist()} if kept else set[int]()
    )
    data, evaluation = sections_of(recipe)
    sources = keyed_sources(data, evaluation)
    texts = [
        islice(texts_of(data, recipe.seed, source, key, hashes, tokenizer), DOCUMENTS_A_SET) for key, source in sources
    ]
    while texts:
        for one in list(texts):
            text = next(one, None)
            if text is None:
                texts.remove(one)
            else:
                yield text


def texts_of(
    data: Data, seed: int, source: DocumentSource, key: str, hashes: set[int], tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """A source's documents that were held out, as far as a look at its beginning finds them; nothing is tokenised for
    it."""
    opened = open_source(data, source, key, DocumentEncoder(tokenizer), default_cache_dir(), seed)
    work, plan = opened.work, opened.plan
    items = (item for pieces in plan.shards for piece in pieces for item in read_piece(source, piece, key))
    documents = islice(apply_policy(items, work.on_bad_row, key, []), DOCUMENTS_READ)
    yield from (text for text, _ in keep(documents, work, Counter()) if xxh3_64_intdigest(text.encode()) in hashes)


def in_windows(
    where: str, documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> JudgedText:
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
