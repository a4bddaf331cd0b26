from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cpt.training.liveness import GroupTimeouts

ARGS = SimpleNamespace(ddp_timeout_delta=timedelta(seconds=77))


@pytest.fixture
def in_a_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def seconds_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_groups_of_libraries_wait_as_long_as_the_recipe_says(in_a_group):
    callback, engines = GroupTimeouts(), dist.new_group(backend="gloo")
    assert seconds_of(engines) == 1800
    callback.on_train_begin(ARGS, None, None)
    assert seconds_of(engines) == seconds_of(dist.group.WORLD) == 77
    made_in_the_first_step = dist.new_group()
    callback.on_step_end(ARGS, None, None)
    made_later = dist.new_group()
    callback.on_step_end(ARGS, None, None)
    assert (seconds_of(made_in_the_first_step), seconds_of(made_later)) == (77, 1800)
