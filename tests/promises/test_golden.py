"""Tiny recipes of every kind still have the batches, losses, FLOPs and plans of golden.json (to change it, see
golden.py)."""

import json

import pytest
import torch
from promises.golden import FILE, NAMES, measure

QUICK = ("pretrain-llama", "sft")
GOLDEN = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, own_cache):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path_factory.mktemp("golden")
    torch.set_num_threads(threads)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_batches_losses_and_plan_are_those_of_the_file(folder, name):
    found, known = measure(name, folder), GOLDEN[name]
    assert found["batches"] == known["batches"]
    # Processors add in other orders: between two of them, losses of these six steps differed by 2e-5.
    assert found["losses"] == pytest.approx(known["losses"], rel=1e-4, abs=1e-6)
    assert found["gradient_norms"] == pytest.approx(known["gradient_norms"], rel=1e-3)
    assert found["flops_per_token"] == pytest.approx(known["flops_per_token"], rel=1e-9)
    assert found["plan"]["cpu"] == pytest.approx(known["plan"]["cpu"], rel=1e-6)
    assert found["plan"]["RTX 4090"] == pytest.approx(known["plan"]["RTX 4090"], rel=1e-6)
