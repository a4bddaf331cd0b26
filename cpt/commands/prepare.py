"""`cpt prepare RECIPE`: tokenize and pack a recipe's documents ahead of its run, on one machine or on many."""

import logging
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cpt.cache import cannot_keep, default_cache_dir
from cpt.command_line import Overrides, RecipePath, show_log
from cpt.data.readers.columns import form_of_stage
from cpt.data.rows.contamination import with_decontamination
from cpt.data.rows.open_sources import open_sources
from cpt.data.store.parallel import num_workers
from cpt.data.store.shards import Shard, ShardWork
from cpt.data.store.token_files import Bucket, bucket
from cpt.data.store.tokenization import DocumentEncoder
from cpt.data.store.tokenized import SourceShard, make_in_order
from cpt.errors import LaunchError, RecipeError, ResourceError, install_line
from cpt.recipe.load import load_recipe
from cpt.recipe.rules import keyed_sources
from cpt.recipe.schema import Recipe

if TYPE_CHECKING:
    from cpt.data.rows.build import PreparedData

log = logging.getLogger("cpt")
UPLOADS_AT_ONCE = 16
RETRIES = 5  # of a Ray task whose process or machine died
PASSED_ON = ("CPT_STORE", "HF_HUB_OFFLINE", "HF_HOME", "HF_TOKEN", "HF_ENDPOINT")


def command(
    recipe: RecipePath,
    overrides: Overrides = None,
    shard: Annotated[
        str | None, typer.Option(help="Make only part I of N, such as 3/16, of a shared store.")
    ] = None,
    cluster: Annotated[
        Literal["ray"] | None, typer.Option("--with", help="Make shards on a Ray cluster.")
    ] = None,
) -> None:
    """Tokenize into the store. Existing shards are skipped, so an interrupted command can be repeated.

    Example: cpt prepare recipe.yaml --shard 3/16
    """
    if shard is not None and cluster is not None:
        raise RecipeError("--shard and --with ray both divide the work. Remove one of the two.")
    show_log()
    loaded = load_recipe(recipe, overrides or ())

    # Imported after the recipe is loaded: they import torch, which takes seconds.
    from cpt.data.rows.build import data_of
    from cpt.tokenizer.load import load_tokenizer

    start = time.monotonic()
    if cluster is not None:
        made_by_ray = prepare_on_ray(loaded)
        typer.echo(f"{made_by_ray:,} shards made by Ray ({time.monotonic() - start:.1f} s).")
    if shard is not None:
        numbers = re.fullmatch(r"(\d+)/(\d+)", shard)
        if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
            raise RecipeError(
                f"--shard: expected I/N with I from 1 to N, such as 3/16, got `{shard}`."
            )
        num_made, num_missing = prepare_shard(loaded, int(numbers[1]), int(numbers[2]))
        seconds = time.monotonic() - start
        typer.echo(f"{num_made:,} shards made for part {shard} ({seconds:.1f} s).")
        if num_missing:
            typer.echo(
                f"{num_missing:,} shards of other parts are missing. Afterwards: cpt prepare {recipe}"
            )
            return
    prepared = data_of(loaded, load_tokenizer(loaded.tokenizer, loaded.model), whole=True)
    store = bucket()
    if store is not None:
        log.info(f"{upload(prepared, store):,} shards uploaded to {store.url}.")
    seconds = time.monotonic() - start
    documents = sum(source.documents for source in prepared.sources)
    typer.echo(
        f"{prepared.num_tokens:,} tokens of {documents:,} documents are ready ({seconds:.1f} s)."
    )


def upload(prepared: "PreparedData", store: Bucket) -> int:
    """Upload the shards that are on this disk but not in the bucket; return their number."""
    new_folders: list[Path] = []
    for source in prepared.tokenized.values():
        uploaded = store.shards(source.folder)
        for folder in map(source.shard_folder, source.plan.numbers):
            if folder.name not in uploaded and folder.exists():
                new_folders.append(folder)
    with ThreadPoolExecutor(UPLOADS_AT_ONCE) as pool:
        list(pool.map(partial(upload_shard, store=store), new_folders))
    return len(new_folders)


def upload_shard(folder: Path, store: Bucket) -> None:
    try:
        store.put(folder)
    except OSError as problem:
        raise cannot_keep(folder.parent, problem) from problem


def prepare_shard(recipe: Recipe, part: int, of: int) -> tuple[int, int]:
    """Make part `part` of `of` parts, counted from 1; return the number of shards made by this call, and of those
    still missing in the store. Parts may be made at the same time, on any machines."""
    shards = all_shards(recipe)
    store = bucket()
    missing = unmade(shards[part - 1 :: of])
    workers = min(num_workers(), len(missing)) if len(missing) > 1 else 0
    for source, number in make_in_order(missing, workers, list({source for source, _ in missing})):
        if store is not None:
            upload_shard(source.shard_folder(number), store)
    return len(missing), len(unmade(shards))


def prepare_on_ray(recipe: Recipe) -> int:
    """Make the missing shards as tasks of the Ray cluster at RAY_ADDRESS, by default on this machine; return their
    number. All machines must share the store's folder, or CPT_STORE."""
    try:
        import ray
    except ImportError as problem:
        raise ResourceError(f"--with ray needs Ray: {install_line('ray')}.") from problem
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    missing = unmade(all_shards(recipe))
    ray.init(
        ignore_reinit_error=True, logging_level=logging.ERROR, runtime_env={"env_vars": environment}
    )
    try:
        task = ray.remote(num_cpus=1, max_retries=RETRIES, retry_exceptions=False)(make_remotely)
        works = {source: ray.put(source.proven_work) for source, _ in missing}
        unfinished = []
        for source, number in missing:
            name = source.shard_folder(number).name
            shard = source.plan.shards[number]
            unfinished.append(task.remote(works[source], shard, name, str(Path.cwd())))
        while unfinished:
            (finished,), unfinished = ray.wait(unfinished, num_returns=1)
            ray.get(finished)
    except ray.exceptions.RayTaskError as problem:
        raise problem.cause from problem
    except ray.exceptions.RayError as problem:
        raise LaunchError(
            f"a Ray task died ({str(problem).splitlines()[0]}). The same command resumes."
        ) from problem
    finally:
        ray.shutdown()
    return len(missing)


def make_remotely(work: ShardWork, shard: Shard, name: str, folder: str) -> None:
    """One Ray task. Relative paths refer to the folder in which the command was started."""
    os.chdir(folder)
    work(shard, name)
    store = bucket()
    if store is not None:
        upload_shard(work.folder / name, store)


def all_shards(recipe: Recipe) -> list[SourceShard]:
    """Every shard of the sources and held-out sets that the run opens, in an order that all processes share."""
    from cpt.data.rows.build import shards_of, with_checked_form
    from cpt.optim.schedules import phases_in_tokens
    from cpt.tokenizer.load import load_tokenizer

    cache_dir = default_cache_dir().absolute()  # Ray's tasks may start in another folder
    data, evaluation = with_checked_form(
        phases_in_tokens(recipe), recipe.evaluation, form_of_stage(recipe.stage)
    )
    clean = with_decontamination(data, evaluation, cache_dir)
    encoder = DocumentEncoder(load_tokenizer(recipe.tokenizer, recipe.model))
    sources = open_sources(
        clean,
        dict(keyed_sources(clean, evaluation)),
        encoder,
        cache_dir,
        recipe.seed,
        evaluation.held_out_share or 0.0,
    ).values()
    return shards_of(sources)


def unmade(shards: Sequence[SourceShard]) -> list[SourceShard]:
    """The shards that are neither on this disk nor in the bucket."""
    store = bucket()
    missing: list[SourceShard] = []
    for source, of_source in groupby(shards, key=lambda shard: shard[0]):
        uploaded = store.shards(source.folder) if store is not None else set()
        for number in source.missing([number for _, number in of_source]):
            if source.shard_folder(number).name not in uploaded:
                missing.append((source, number))
    return missing
