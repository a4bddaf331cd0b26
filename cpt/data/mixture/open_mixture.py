"""Look at a mixture alone: `DataLoader(open_mixture("recipes/mixtures/domain/code.yaml", tokenizer),
batch_size=4)`."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cpt.data.build import build_data
from cpt.data.mixture.mixture import MixtureRows
from cpt.recipe.load import load_mixture


def open_mixture(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    overrides: Sequence[str] = (),
    *,
    cache_dir: Path | None = None,
) -> MixtureRows:
    """The rows of a mixture file or of a recipe, in the order of training: a torch dataset that a plain DataLoader
    takes.

    It has no end (its length is 10**12 rows), so leave the DataLoader's `shuffle` off: the rows are shuffled already.
    For some of them: `torch.utils.data.Subset(rows, range(1000))`. Of a recipe nothing is held out here; a run's own
    rows are `build_data(...).rows`.

    Args:
        tokenizer: a Hugging Face tokenizer with an end-of-sequence token.
        overrides: `data.key=value`, on top of the file: `data.sequence_length=512`.
        cache_dir: where tokens are kept; by default $CPT_CACHE or ~/.cache/cpt.
    """
    data, seed = load_mixture(path, overrides)
    return build_data(data, tokenizer, seed=seed, cache_dir=cache_dir).rows
