"""Start real runs in processes of their own, each of the five ways, and read what they leave behind."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def command(way: str, *, processes: int, folder: Path) -> list[str]:
    """The words before the recipe."""
    program = "cpt/train.py"
    match way:
        case "cpt":
            return [str(BIN / "cpt"), "train"]
        case "python":
            return [sys.executable, program]
        case "torchrun":
            return [str(BIN / "torchrun"), "--standalone", f"--nproc_per_node={processes}", program]
        case "accelerate":
            kind = {"distributed_type": "MULTI_GPU" if processes > 1 else "NO", "use_cpu": processes == 1}
            machine = {"compute_environment": "LOCAL_MACHINE", "main_process_port": free_port()}
            config = {**machine, **kind, "num_processes": processes}
            (folder / "accelerate.yaml").write_text(yaml.safe_dump(config))
            return [str(BIN / "accelerate"), "launch", "--config_file", str(folder / "accelerate.yaml"), program]
        case "deepspeed":
            return [str(BIN / "deepspeed"), "--num_gpus", str(processes), "--master_port", str(free_port()), program]
    raise ValueError(way)


def environment_of_a_run() -> dict[str, str]:
    """One thread a process, on the CPU, knowing of no other run."""
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    for inherited in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(inherited, None)
    return environment


def launch(
    recipe: Path, *, way: str = "python", processes: int = 1, arguments: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    """Run the recipe to its end."""
    words = [*command(way, processes=processes, folder=recipe.parent), str(recipe), *arguments]
    return subprocess.run(words, cwd=ROOT, env=environment_of_a_run(), capture_output=True, text=True, timeout=540)


def launch_to_its_end(recipe: Path, *, processes: int = 1, arguments: tuple[str, ...] = ()) -> None:
    """Run the recipe with torchrun where there are several processes; it must succeed."""
    ended = launch(recipe, way="torchrun" if processes > 1 else "python", processes=processes, arguments=arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def run_program(program: Path, *arguments: object, processes: int = 2) -> None:
    """Run a test's own program with torchrun; it must succeed."""
    start = [BIN / "torchrun", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else [sys.executable]
    environment = {**environment_of_a_run(), "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    words = [str(word) for word in (*start, program, *arguments)]
    ended = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]


def losses(run: Path) -> list[float]:
    """The training loss of each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def zero_profile(folder: Path, stage: int, *, offload: bool = False) -> str:
    """A DeepSpeed profile for two processes on the CPU."""
    zero: dict = {"stage": stage, "reduce_bucket_size": 10_000}
    if stage == 3:
        zero |= {"stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0}
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


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
