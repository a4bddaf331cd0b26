"""Every private name of transformers, TRL, peft, accelerate and the libraries around them that cpt uses, with its
reason; `USED` is the contract that a test checks.

Read in transformers 5.17 and 5.23, TRL 1.12, peft 0.21, accelerate 1.15.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers.integrations import deepspeed, is_deepspeed_zero3_enabled

USED = {  # dotted name -> its parameters ("" for what is not called), why, what ends it
    "transformers.PreTrainedModel._supports_sdpa": ("", "which attention a family has", "a public list of them"),
    "transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref": (
        "",
        "put DeepSpeed's config back after a model was built without ZeRO-3",
        "a public function that returns the object and not its dict",
    ),
}


def supports_sdpa(model: nn.Module | type[nn.Module]) -> bool:
    """True where the family of this model has torch's fused attention."""
    return bool(model._supports_sdpa)


@contextmanager
def without_zero3() -> Iterator[None]:
    """Inside, transformers builds plain models although the run uses ZeRO-3."""
    if not is_deepspeed_zero3_enabled():
        yield
        return
    config = deepspeed._hf_deepspeed_config_weak_ref()  # type: ignore[misc]
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed.set_hf_deepspeed_config(config)
