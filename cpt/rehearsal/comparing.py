"""A resumed run against the same run uninterrupted: losses and weights, bit for bit or, where the run says so itself,
up to rounding."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from cpt.checkpoints.manifest import MANIFEST, Manifest, read_manifest
from cpt.errors import CheckpointError
from cpt.rehearsal.table import Finding, bad, good
from cpt.stages.resuming import BIT_EXACT

ROUNDING, ROUNDING_IN_16_BITS = 1e-3, 2e-2  # relative, of losses
STATE = (
    "Something that decides the next step is kept outside of model, optimizer, schedule and random numbers: give it a"
    " state_dict"
)


def compared(
    straight: Mapping[int, float],
    resumed: Mapping[int, float],
    exports: tuple[Path, Path],
    manifest: Manifest,
    *,
    half: bool,
) -> Finding:
    """The row of the table.

    Args:
        straight: losses by step, of the run that was not interrupted.
        exports: its model, and that of the resumed one.
        manifest: of the checkpoint between; it says what the run promises.
    """
    steps = [step for step in straight if step > manifest.step]
    if missing := [step for step in steps if step not in resumed]:
        return bad("resume", CheckpointError(f"the resumed run made no step {missing[0]}."))
    what = f"steps {', '.join(map(str, steps))} in new processes" if steps else "new processes"
    same_losses = all(straight[step].hex() == resumed[step].hex() for step in steps)
    weights = hashes(exports[0]), hashes(exports[1])
    differs = weights[0] is not None and weights[1] is not None and weights[0] != weights[1]
    if same_losses and not differs:
        also = "losses and weights" if weights[0] is not None and weights[1] is not None else "losses"
        return good("resume", f"{what}: the same {also}, bit for bit")
    apart = max((abs(resumed[step] / straight[step] - 1) for step in steps), default=0.0)
    allowed = ROUNDING_IN_16_BITS if half else ROUNDING
    found = f"{what}: losses differ by {apart:.1e}" + (
        f", weights by {farthest(*exports):.1e} of the largest" if differs else ""
    )
    if manifest.exactness == BIT_EXACT:
        return bad("resume", CheckpointError(f"{found}, where they should be the same bit for bit. {STATE}."))
    if not apart <= allowed:  # NaN is not
        return bad("resume", CheckpointError(f"{found}, more than rounding explains ({allowed:.0e}). {STATE}."))
    return good("resume", f"{found}, as a run that is no more than that promises ({manifest.exactness})")


def hashes(export: Path) -> dict[str, str] | None:
    """Of the weights' files; None where there is no export."""
    if not (export / MANIFEST).exists():
        return None
    return {
        name: entry.xxh3_128 for name, entry in read_manifest(export).files.items() if name.endswith(".safetensors")
    }


def farthest(one: Path, other: Path) -> float:
    """The largest distance of two numbers at the same place, over the largest number of their tensor."""
    largest = 0.0
    for path in sorted(one.rglob("*.safetensors")):
        with safe_open(path, "pt") as left, safe_open(other / path.relative_to(one), "pt") as right:
            for name in left.keys():  # noqa: SIM118  # it is no mapping
                here, there = left.get_tensor(name).double(), right.get_tensor(name).double()
                if here.numel():
                    largest = max(largest, float((here - there).abs().max() / here.abs().max().clamp(min=1e-30)))
    return largest
