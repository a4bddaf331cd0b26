"""Every private name of transformers, TRL, peft, accelerate and the libraries around them that cpt uses, with its
reason; `USED` is the contract that a test checks.

Read in transformers 5.17 and 5.23, TRL 1.12, peft 0.21, accelerate 1.15.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

USED = {  # dotted name -> its parameters ("" for what is not called), why, what ends it
    "transformers.PreTrainedModel._keep_in_fp32_modules": ("", "what a model never holds in fp16", "a public list"),
    "transformers.PreTrainedModel._keep_in_fp32_modules_strict": (
        "",
        "what a model never holds in fp16 or bf16",
        "a public list",
    ),
    "transformers.PreTrainedModel._supports_sdpa": ("", "which attention a family has", "a public list of them"),
}


def supports_sdpa(model: nn.Module | type[nn.Module]) -> bool:
    """True where the family of this model has torch's fused attention."""
    return bool(model._supports_sdpa)


def modules_kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Parts of names of modules that `from_pretrained(..., dtype=dtype)` leaves in fp32."""
    names = set(model._keep_in_fp32_modules_strict or ())
    return names | set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else names
