"""Models under FSDP2, in the groups that accelerate makes."""

from peft import PeftModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from cpt.models.layers import decoder_layers


class CountedGathers(DefaultAllGather):
    def __init__(self):
        self.count = 0

    def __call__(self, *arguments, **options):
        self.count += 1
        return super().__call__(*arguments, **options)


def shard(model, world_size, **options):
    """As accelerate's `fsdp2_prepare_model`; returns the counter of the group with the head."""
    options["mesh"] = init_device_mesh("cpu", (world_size,))
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    inner = model.get_base_model().base_model if isinstance(model, PeftModel) else model.base_model
    norm = inner.ln_f if "ln_f" in dict(inner.named_children()) else inner.norm
    if embedding.weight is head.weight:
        last = [norm, embedding, head]
    else:
        fully_shard(embedding, **options)
        last = [norm, head]
    fully_shard(last, reshard_after_forward=False, **options)
    fully_shard(model, **options)
    gathers = CountedGathers()
    head.set_custom_all_gather(gathers)
    return gathers
