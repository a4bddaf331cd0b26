"""ZeRO-3's weights are put together out of the parts of all processes; tests/end_to_end/test_saving.py does it with
DeepSpeed's own."""

import subprocess
import sys
from pathlib import Path

import pytest

TORCHRUN = Path(sys.executable).with_name("torchrun")
PROGRAM = """
import os, threading
from datetime import timedelta
from types import SimpleNamespace
import torch, torch.distributed as dist
from torch import nn
from cpt.checkpoints.agreement import Agreement, SaveFailed
from cpt.checkpoints.zero_parts import ZeroParts, parts_of
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.ModuleDict({"embedding": nn.Embedding(7, 3), "norm": nn.BatchNorm1d(5), "head": nn.Linear(3, 7, bias=False)}).bfloat16()
model["head"].weight = model["embedding"].weight
model["norm"].bias.requires_grad_(False)
model.register_buffer("fleeting", torch.ones(1), persistent=False)
whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}


def cut(parameter, number):  # as ZeRO-3 does
    length = -(-parameter.numel() // 2)
    padded = torch.cat((parameter.data.flatten(), torch.full((2 * length - parameter.numel(),), 99.0).bfloat16()))
    part = padded[rank * length : (rank + 1) * length].clone()
    part.status = SimpleNamespace(name="AVAILABLE")
    vars(parameter).update(ds_id=number, ds_tensor=part, ds_shape=parameter.shape, ds_numel=parameter.numel())
    parameter.data = torch.empty(0, dtype=parameter.dtype)


assert parts_of(model, only_trained=False) is None  # nothing is cut yet
for number, parameter in enumerate(model.parameters()):
    cut(parameter, number)
agreement = Agreement(timedelta(seconds=60))


def check(parts, names):
    together = parts.put_together(agreement)
    assert (together is None) == (rank > 0)
    if together is not None:
        assert list(together) == names, list(together)
        for name, tensor in together.items():
            assert torch.equal(tensor, whole[name]) and tensor.dtype == whole[name].dtype, name
        assert together["embedding.weight"] is together["head.weight"]


def behind():
    parts = parts_of(model, only_trained=False)
    assert parts.bytes_of_whole() == 2 * (21 + 5 + 5)
    check(parts, list(whole))
    check(parts_of(model, only_trained=True), [name for name in whole if name != "norm.bias"])
    ZeroParts.empty_rows = lambda self, processes: bytearray(2**62)
    try:
        parts.put_together(agreement)
    except SaveFailed as failure:
        assert "MemoryError" in str(failure), failure
    else:
        raise AssertionError("there is no such memory")
    print("put together\\n", end="", flush=True)


thread = threading.Thread(target=behind)
thread.start()
for number in range(50):  # what training does meanwhile
    total = torch.ones(1000)
    dist.all_reduce(total)
    assert total[0] == 2
thread.join()
model["norm"].weight.ds_tensor.status.name = "NOT_AVAILABLE"  # on a disk
assert parts_of(model, only_trained=False) is None
dist.barrier()
os._exit(0)
"""  # noqa: E501


@pytest.mark.long
def test_the_main_process_gets_all_weights_while_the_others_train(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = [TORCHRUN, "--standalone", "--nproc_per_node=2", program]
    ended = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stdout.count("put together") == 2, ended.stdout + ended.stderr
