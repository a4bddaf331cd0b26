"""Every private name of transformers, TRL, peft, accelerate and the libraries around them that cpt uses, with its
reason; `USED` is the contract that a test checks.

Read in transformers 5.17 and 5.23, TRL 1.12, peft 0.21, accelerate 1.15.
"""

from transformers import PreTrainedModel

USED = {  # dotted name -> its parameters ("" for what is not called), why, what ends it
    "transformers.PreTrainedModel._supports_sdpa": ("", "which attention a family has", "a public list of them"),
}


def supports_sdpa(model: PreTrainedModel | type[PreTrainedModel]) -> bool:
    """True where the family of this model has torch's fused attention."""
    return bool(model._supports_sdpa)
