"""Two real processes under ZeRO-3: the same weights as one process builds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_tokenizer, tiny_config

from cpt.models.build import build_model
from cpt.recipe.schema import Model

SCRIPT = Path(__file__).parent / "zero3_weights.py"


def compare(sections: list[dict], num_tokens: int, folder: Path, *options: str) -> None:
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        [*run, str(SCRIPT), json.dumps(sections), str(num_tokens), str(folder), *options],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    assert len(results) == 2 * len(sections), done.stdout[-2000:] + done.stderr[-4000:]
    for result in results:
        assert result["partitioned"] and result["different"] == [] and result["left"] == []


@pytest.mark.slow
def test_a_seed_means_the_same_weights_with_and_without_zero3(tmp_path: Path):
    sections = [{"from_scratch": True, "config": tiny_config(name)} for name in ("llama", "cpt-gpt2", "minimind2_moe")]
    compare([*sections, sections[0] | {"lora": {"r": 2}}], 96, tmp_path)


@pytest.mark.long
def test_loaded_and_grown_weights_are_the_same_with_and_without_zero3(tmp_path: Path):
    sections = []
    for name in ("llama", "gpt2", "minimind2_moe"):
        build_model(Model(from_scratch=True, config=tiny_config(name)), make_tokenizer()).save_pretrained(
            tmp_path / name
        )
        sections.append({"path": str(tmp_path / name), "resize_embeddings": True})
    sections.append({"path": str(tmp_path / "gpt2"), "config": tiny_config("cpt-gpt2"), "resize_embeddings": True})
    compare(sections, 150, tmp_path)
    compare(
        [*sections, {"path": str(tmp_path / "llama"), "resize_embeddings": True, "lora": {"r": 2}}],
        96,
        tmp_path,
        "bf16",
    )
