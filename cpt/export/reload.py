"""Load an export without this package, and save its logits: `python -I reload.py JOB.json`, where `cpt` cannot be
imported."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)


def main() -> None:
    """Save the logits on the job's text, [T, V] in fp32, or a reward model's score."""
    sys.modules["cpt"] = None  # type: ignore[assignment]  # makes the import fail
    job = json.loads(Path(sys.argv[1]).read_text())
    folder = job["folder"]
    ids = AutoTokenizer.from_pretrained(folder)(job["text"], add_special_tokens=False)["input_ids"][
        : len(job["ids"])
    ]
    if ids != job["ids"]:
        raise SystemExit(
            f"the exported tokenizer gives different tokens: {ids[:8]} instead of {job['ids'][:8]}"
        )
    own_code: dict[str, Any] = {}
    if job["own_code"]:
        own_code["trust_remote_code"] = True
    options: dict[str, Any] = {
        "dtype": getattr(torch, job["dtype"]),
        "output_loading_info": True,
        **own_code,
    }
    if job["device"]:
        options["device_map"] = job["device"]
    if job["base"]:
        from peft import PeftModel

        kind: Any = AutoModelForCausalLM
        base, info = kind.from_pretrained(job["base"], **options)
        model = PeftModel.from_pretrained(base, folder)
    else:
        architectures = AutoConfig.from_pretrained(folder, **own_code).architectures or ()
        is_reward_model = any(name.endswith("ForSequenceClassification") for name in architectures)
        kind = AutoModelForSequenceClassification if is_reward_model else AutoModelForCausalLM
        model, info = kind.from_pretrained(folder, **options)
    if info["missing_keys"] or info["unexpected_keys"]:
        raise SystemExit(
            f"missing {sorted(info['missing_keys'])[:3]}, unknown {sorted(info['unexpected_keys'])[:3]}"
        )
    with torch.no_grad():
        output = model.eval()(torch.tensor([ids], device=model.device), use_cache=False)
    save_file({"logits": output.logits[0].float().cpu().contiguous()}, job["output"])


if __name__ == "__main__":
    main()
