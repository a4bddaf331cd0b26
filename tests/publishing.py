"""Publish checkpoints of a chosen size, as a run would."""

from datetime import timedelta

import torch
from safetensors.torch import save_file
from tiny_run import manifest_of

from cpt.checkpoints.transaction import Agreement, Contents, publish


def contents(step=1, numbers=1000):
    """Weights in safetensors, two files of torch's, a text; all numbers are the step's."""

    def write_model(folder, weights):
        folder.mkdir()
        save_file({"weight": torch.full((numbers,), float(step))}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")

    states = {
        "optimizer.pt": {"m": torch.full((numbers,), float(step))},
        "global_step/part.pt": {"v": torch.full((numbers,), float(step))},
        "scheduler.pt": {},
        "rng_state.pth": {},
    }
    return Contents(
        manifest_of({}, step),
        torch.nn.Linear(1, 1),
        states=states,
        texts={"trainer_state.json": f'{{"global_step": {step}, "log_history": []}}'},
        write_model=write_model,
    )


def save(folder, step=1, numbers=1000, **options):
    alone = Agreement(timedelta(seconds=60))
    return publish(
        folder,
        f"checkpoint-{step}",
        contents(step, numbers),
        alone,
        **options,
    )
