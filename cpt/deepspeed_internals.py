"""Every private name of DeepSpeed that cpt uses, each with its reason; `USED` is the contract that a test checks.

Read in DeepSpeed 0.19.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

USED = {  # dotted name -> its parameters ("" if not called), the reason, what would replace it
    "deepspeed.runtime.engine.DeepSpeedEngine._zero3_consolidated_16bit_state_dict": (
        "exclude_frozen_parameters",
        "gather ZeRO-3's weights on the main process; the public function writes them to a file",
        "a public function that returns them",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_norm_groups": (
        "",
        "an infinite norm makes ZeRO-3 skip a bad step, without a further wait",
        "a public hook before the update",
    ),
    "deepspeed.runtime.engine.DeepSpeedEngine._running_engine_step": (
        "",
        "whether an error came before the update",
        "a public counter",
    ),
    "deepspeed.DeepSpeedEngine._copy_recovery_script": (
        "save_path",
        "save without writing",
        "an option to omit it",
    ),
}


def gather_zero3_weights(engine: Any, *, only_trained: bool) -> dict[str, Any] | None:
    """Gather the weights on the main process; every process must call this."""
    weights: dict[str, Any] | None = engine._zero3_consolidated_16bit_state_dict(
        exclude_frozen_parameters=only_trained
    )
    return weights


def updates_begun(engine: Any) -> tuple[int, bool]:
    """Changes as soon as the engine begins an update, also one that it skips."""
    return engine.global_steps, engine._running_engine_step


def stop_loading_universal(engine: Any) -> None:
    """Reset the flag after loading, so that later saves use this run's processes."""
    engine.load_universal_checkpoint = lambda: False


def replace_norms_of_groups(optimizer: Any, norms: Callable[[], Any]) -> Callable[[], Any]:
    """Make ZeRO-3 read the norms of its groups from this function; return the original."""
    original: Callable[[], Any] = optimizer._get_norm_groups
    optimizer._get_norm_groups = norms
    return original


@contextmanager
def without_recovery_script(engine: Any) -> Iterator[None]:
    """Keep `save_checkpoint` from copying a script to the checkpoint's folder, which then need not exist."""
    engine._copy_recovery_script = lambda save_path: None
    try:
        yield
    finally:
        del engine._copy_recovery_script
