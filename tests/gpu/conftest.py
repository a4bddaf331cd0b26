"""Which device the processes use that tests of a GPU start: the GPU, by DeepSpeed too."""

import pytest
from gpu_device import DEVICE, let_deepspeed_use


@pytest.fixture(autouse=True)
def deepspeed_may_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other tests keep DeepSpeed on the CPU."""
    let_deepspeed_use(DEVICE, monkeypatch)
