"""One worker's share of a recipe's shards: its own ones first, then those that nobody has begun."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cpt.data.build import as_asked
from cpt.data.checking.contamination import with_decontamination
from cpt.data.open_sources import open_sources
from cpt.data.parallel import num_workers
from cpt.data.store.bucket import bucket
from cpt.data.store.claims import Claims
from cpt.data.store.fill import Wanted, made
from cpt.data.store.folder import CLAIMS, default_cache_dir
from cpt.data.store.tokenized import TokenizedSource
from cpt.data.store.uploading import upload_shards
from cpt.data.tokenization import DocumentEncoder
from cpt.errors import RecipeError
from cpt.recipe.schema import Data, Evaluation


@dataclass(frozen=True)
class Share:
    """Part `part` of `of`, counted from 1."""

    part: int
    of: int

    def __str__(self) -> str:
        return f"{self.part}/{self.of}"


@dataclass(frozen=True)
class Done:
    """What a worker did, and whether it was the last one."""

    shards: int
    """Made by this worker."""
    all_shards: int
    missing: int
    """Not there yet: others are at them."""


def make_share(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    share: Share,
    *,
    seed: int,
    evaluation: Evaluation,
    cache_dir: Path | None = None,
    form: str = "document",
) -> Done:
    """Make the shards of a share, then those that no other worker has claimed, in a store that all workers see.

    Raises:
        DataError, RecipeError, ResourceError: as `build_data`; or the recipe bounds its store, which is for a run to
        fill.
    """
    if data.disk_bytes is not None:
        raise RecipeError(
            "`data.disk_bytes` bounds the store, which is filled while the run reads. Leave it out to prepare in"
            " shares."
        )
    cache = cache_dir or default_cache_dir()
    data, evaluation, form = as_asked(data, evaluation, form)
    clean = with_decontamination(data, evaluation, cache)
    sources = list(open_sources(clean, evaluation, DocumentEncoder(tokenizer), cache, seed).values())
    shards = [(source, number) for source in sources for number in range(len(source.plan.shards))]
    workers, store, count = num_workers(), bucket(), 0
    with Claims(str(share)) as claims:
        for source, number in made(to_do(shards, share, claims), workers, sources):
            if store is not None:
                upload_shards(source, [number], store)
            claims.drop(claim_of(source, number))
            count += 1
    if store is not None:  # also what this worker made before it was killed
        for source in sources:
            absent = set(source.absent(range(len(source.plan.shards))))
            upload_shards(source, [number for number in range(len(source.plan.shards)) if number not in absent], store)
    return Done(count, len(shards), sum(len(source.unmade(range(len(source.plan.shards)))) for source in sources))


def to_do(shards: Sequence[Wanted], share: Share, claims: Claims) -> Iterator[Wanted]:
    """The shards that this worker makes: asked for the next one whenever it is free, so that faster workers make more.

    With a bucket, workers need not see each other's disks, and so not each other's claims: then each makes its own
    part only.
    """
    for turn in range(share.of if bucket() is None else 1):
        part = shards[(share.part - 1 + turn) % share.of :: share.of]
        missing = {
            source: set(source.unmade([number for _, number in some])) for source, some in by_source(part).items()
        }
        for source, number in part:
            if number in missing[source] and claims.take(claim_of(source, number)):
                if source.missing([number]):
                    yield source, number
                else:  # it was finished between the two
                    claims.drop(claim_of(source, number))


def by_source(shards: Sequence[Wanted]) -> dict[TokenizedSource, list[Wanted]]:
    """Grouped."""
    groups: dict[TokenizedSource, list[Wanted]] = {}
    for source, number in shards:
        groups.setdefault(source, []).append((source, number))
    return groups


def claim_of(source: TokenizedSource, number: int) -> Path:
    """The claim on a shard."""
    return source.folder / CLAIMS / source.shard_folder(number).name
