"""Under DeepSpeed ZeRO-3: build the whole model on the main process's CPU, then give every process its part.

transformers partitions while it builds, and then draws other random weights than without ZeRO-3 (the order of the
draws differs). Built whole, a seed means the same weights under every launcher, and resizing or converting needs no
second way of doing it. Costs host memory for one whole copy on the main process, as reading a checkpoint under ZeRO-3
does in any case.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.integrations import is_deepspeed_zero3_enabled

from cpt.ranks import is_main_process, main_process_first


@contextmanager
def without_zero3() -> Iterator[None]:
    """Inside, transformers builds plain models although the run uses ZeRO-3."""
    if not is_deepspeed_zero3_enabled():
        yield
        return
    config = hf_deepspeed._hf_deepspeed_config_weak_ref()  # type: ignore[misc]  # the only way to find it again afterwards
    hf_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        hf_deepspeed.set_hf_deepspeed_config(config)


def build_partitioned(build_whole: Callable[[], PreTrainedModel], trust_remote_code: bool) -> PreTrainedModel:
    """Build the whole model on the main process and return this process's partitioned one with the same weights."""
    import torch.distributed as dist

    with without_zero3():
        whole = main_process_first(lambda: build_whole() if is_main_process() else None)
    shared: list[PreTrainedConfig | torch.dtype | None] = [None, None, None]
    if whole is not None:
        shared = [whole.config, whole.dtype, whole.config._attn_implementation]
    dist.broadcast_object_list(shared, src=0)
    config, dtype, attention = shared
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    _copy_weights(whole, model)
    if whole is not None and whole.generation_config is not None:
        model.generation_config = whole.generation_config
    return model


@torch.no_grad()
def _copy_weights(whole: PreTrainedModel | None, model: PreTrainedModel) -> None:
    import deepspeed
    import torch.distributed as dist

    source = {} if whole is None else dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if source:
                parameter.copy_(source[name])
    buffers = {} if whole is None else dict(whole.named_buffers())
    for name, buffer in model.named_buffers():
        if buffers:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, src=0)
