"""Make runs.tar.xz and expected.json with the commit that is checked out: `python make.py NEW_FOLDER`.

Two runs, `plain` (one process) and `zero2` (two processes under DeepSpeed), each of 10 steps: killed with a
checkpoint of step 3, changed to another learning rate, killed with a checkpoint of step 6. The losses are those of the
same runs without the second kill.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
PARTS = ("corpus", "tokenizer", "lab.py", "recipe.yaml", "zero2.yaml", "zero2.json")
NOT_KEPT = (".lock", "debug.log", "__pycache__")
CHANGE = ("optimizer.learning_rate=5e-3", "--change", "--note", "half the rate")
PROMPT = "The cow says mo. The yak says"


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir()
    for part in PARTS:
        copy = shutil.copytree if (HERE / part).is_dir() else shutil.copy2
        copy(HERE / part, folder / part)
    expected: dict[str, dict] = {"runs": {}, "versions": versions(), "prompt": PROMPT}
    for name, recipe, processes in (("plain", "recipe.yaml", 1), ("zero2", "zero2.yaml", 2)):
        train(folder, recipe, processes, kill_at=4)
        keep_aside = folder / "aside"
        shutil.copytree(folder / "runs" / name, keep_aside)
        train(folder, recipe, processes, *CHANGE)
        expected["runs"][name] = losses(folder / "runs" / name)
        shutil.rmtree(folder / "runs" / name)
        keep_aside.rename(folder / "runs" / name)
        train(folder, recipe, processes, *CHANGE, kill_at=7)
    cpt(folder, "export", "runs/plain/checkpoint-6", "--output", "export", "--dtype", "float32")
    expected["logits"] = logits(folder / "export")
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    with tarfile.open(HERE / "runs.tar.xz", "w:xz") as archive:
        for part in ("runs", "store", "export"):
            archive.add(folder / part, part, filter=without_traces)


def train(folder: Path, recipe: str, processes: int, *words: str, kill_at: int = 0) -> None:
    command = [sys.executable, "-m", "cpt", "train", recipe, *words]
    if processes > 1:
        starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [*starter, "-m", "cpt.train", recipe, *words]
    ended = subprocess.run(command, cwd=folder, env=environment(folder, KILL_AT=str(kill_at)))
    is_killed = ended.returncode == -signal.SIGKILL or (processes > 1 and ended.returncode == 1)
    assert is_killed if kill_at else ended.returncode == 0, ended.returncode


def cpt(folder: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "cpt", *words], cwd=folder, env=environment(folder), check=True)


def environment(folder: Path, **variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    fixed = {"CPT_CACHE": "store", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **fixed, "PYTHONPATH": path, **variables}


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def logits(model: Path) -> list[float]:
    """Of the word after PROMPT, by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(model)(input_ids=ids).logits[0, -1].tolist()


def versions() -> dict[str, str]:
    import deepspeed
    import torch
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "deepspeed": deepspeed.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
    }


def without_traces(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return None if Path(entry.name).name in NOT_KEPT else entry


if __name__ == "__main__":
    main()
