"""Start real runs in processes of their own, and read what they leave behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def environment_of_a_run() -> dict[str, str]:
    """One thread a process, DeepSpeed on the device of this process, knowing of no other run."""
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    for inherited in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(inherited, None)
    return environment


def starter(processes: int) -> list[str]:
    if processes == 1:
        return [sys.executable]
    return [str(BIN / "torchrun"), "--standalone", f"--nproc_per_node={processes}"]


def launch(
    recipe: Path, *, processes: int = 1, arguments: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    """Run the recipe to its end, with torchrun where there are several processes."""
    words = [*starter(processes), "cpt/train.py", str(recipe), *arguments]
    return subprocess.run(
        words, cwd=ROOT, env=environment_of_a_run(), capture_output=True, text=True, timeout=540
    )


def launch_to_its_end(recipe: Path, *, processes: int = 1, arguments: tuple[str, ...] = ()) -> None:
    """It must succeed."""
    ended = launch(recipe, processes=processes, arguments=arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def run_program(program: Path, *arguments: object, processes: int = 2) -> None:
    """Run a test's own program with torchrun; it must succeed."""
    environment = {
        **environment_of_a_run(),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    words = [str(word) for word in (*starter(processes), program, *arguments)]
    ended = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]


def losses(run: Path) -> list[float]:
    """The training loss of each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def zero_profile(folder: Path, stage: int, *, offload: bool = False) -> str:
    """A DeepSpeed profile for two processes on the CPU."""
    zero: dict = {"stage": stage, "reduce_bucket_size": 10_000}
    if stage == 3:
        zero |= {
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_param_persistence_threshold": 0,
        }
    if offload:
        zero |= {"offload_optimizer": {"device": "cpu"}}
        if stage == 3:
            zero |= {"offload_param": {"device": "cpu"}}
    profile = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    path = folder / f"zero{stage}{'_offload' if offload else ''}.json"
    path.write_text(json.dumps(profile))
    return str(path)
