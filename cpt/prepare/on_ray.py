"""The same work on a Ray cluster: a worker on each core that Ray gives, and another one for each that dies."""

import os
from pathlib import Path
from typing import Any

import typer

from cpt.data.store.folder import default_cache_dir
from cpt.data.store.shares import Done, Share
from cpt.errors import CptError, LaunchError, ResourceError
from cpt.prepare.whole import prepare_share
from cpt.recipe.schema import Recipe

RETRIES = 5  # of a worker whose process or machine died; errors of the data end it at once
PASSED_ON = ("CPT_STORE", "HF_HUB_OFFLINE", "HF_HOME", "HF_TOKEN", "HF_ENDPOINT")


def prepare_on_ray(recipe: Recipe, cache_dir: Path | None, workers: int | None) -> None:
    """Make all shards, on the cluster that RAY_ADDRESS names or else on this machine alone; all machines must see the
    store's folder.

    Raises:
        LaunchError: a worker died too often.
        ResourceError: Ray is not installed.
    """
    ray = imported()
    ray.init(ignore_reinit_error=True, logging_level="ERROR", runtime_env={"env_vars": environment()})
    try:
        number = workers or int(ray.cluster_resources().get("CPU", 1))
        typer.echo(f"{number} workers on {len(ray.nodes())} machines of Ray.")
        cache = (cache_dir or default_cache_dir()).absolute()
        work = ray.remote(num_cpus=1, max_retries=RETRIES)(work_of)
        waiting = [work.remote(recipe, Share(part, number), cache, str(Path.cwd())) for part in range(1, number + 1)]
        while waiting:
            (ready,), waiting = ray.wait(waiting, num_returns=1)
            tell_end(ray.get(ready))
    except ray.exceptions.RayError as problem:
        raise LaunchError(
            f"a worker of Ray died ({str(problem).splitlines()[0]}). The same command goes on with what is there."
        ) from problem
    finally:
        ray.shutdown()


def work_of(recipe: Recipe, share: Share, cache_dir: Path, folder: str) -> tuple[Share, Done | CptError]:
    """What a worker does; relative paths mean what they mean where the command was given."""
    os.chdir(folder)
    os.environ["CPT_WORKERS"] = "0"  # Ray gave it one core
    try:
        return share, prepare_share(recipe, share, cache_dir)
    except CptError as problem:
        return share, problem


def tell_end(ended: tuple[Share, Done | CptError]) -> None:
    """Say what a worker did.

    Raises:
        CptError: what it met.
    """
    share, done = ended
    if isinstance(done, CptError):
        raise done
    typer.echo(f"worker {share}: made {done.shards:,} of {done.all_shards:,} shards")


def environment() -> dict[str, str]:
    """What workers on other machines need to know."""
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ}


def imported() -> Any:
    """Ray, told to keep to itself.

    Raises:
        ResourceError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as problem:
        raise ResourceError("--ray needs Ray: pip install 'cpt[ray]'.") from problem
    return ray
