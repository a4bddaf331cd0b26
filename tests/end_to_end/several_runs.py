"""Train several recipes one after the other in the same processes: `... PLAN.json`, a list of {recipe, begins_as,
step, changes}.

`begins_as` is a run's folder that is there by then: the recipe's run begins as a copy of it that was killed after
`step`, and goes on with `changes` (overrides).
"""

import gc
import json
import os
import shutil
import sys
from pathlib import Path

import yaml
from resuming import forget_after
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from cpt.distributed import join_processes, leave_processes, main_process_decides
from cpt.recipe.load import load_recipe
from cpt.train import train

OF_ACCELERATE = ("ACCELERATE_USE_", "FSDP_")  # what it tells itself of the engine of a run


def copy_killed(source: Path, target: Path, step: int) -> None:
    """The run as it was right after the checkpoint of this step."""
    shutil.copytree(source, target)
    forget_after(target, step)
    recipe = yaml.safe_load((target / "recipe.yaml").read_text())
    (target / "recipe.yaml").write_text(
        yaml.safe_dump({**recipe, "name": target.name}, sort_keys=False)
    )


def main() -> None:
    for planned in json.loads(Path(sys.argv[1]).read_text()):
        gc.collect()
        gc.freeze()  # each end of training collects garbage, and what was imported is none
        recipe = load_recipe(Path(planned["recipe"]), planned.get("changes", []))
        join_processes(recipe.training)
        if planned.get("begins_as"):
            source, target = Path(planned["begins_as"]), recipe.output_dir / recipe.name
            main_process_decides(
                lambda s=source, t=target, step=planned["step"]: copy_killed(s, t, step)
            )
        train(recipe, change=True)
        # as long as somebody holds the arguments of a run, transformers takes ZeRO-3 to be on
        unset_hf_deepspeed_config()
        for variable in [name for name in os.environ if name.startswith(OF_ACCELERATE)]:
            del os.environ[variable]
    leave_processes()


if __name__ == "__main__":
    main()
