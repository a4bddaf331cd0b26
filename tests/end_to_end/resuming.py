"""Interrupt a run after the fact, resume it, and compare it with the run that was never interrupted."""

import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from launching import zero_profile
from tiny import TINY_LLAMA, write_recipe

from cpt.checkpoints.model_folder import load_data

# They hold times, paths and unordered sets (peft); their numbers are in other files too.
SAID_OTHERWISE = (
    *("manifest.json", "record.json", "training_args.bin"),
    *("trainer_state.json", "adapter_config.json"),
)


def recipe_of(sections, tmp_path, *, stage, dropout=0.1):
    """The recipe's file: saved after each step, with dropout where random numbers are to count."""
    training = {**sections["training"]}
    if stage:
        training["deepspeed"] = zero_profile(tmp_path, stage)
    model = {**sections["model"], "config": {**TINY_LLAMA, "attention_dropout": dropout}}
    saved = {"every_steps": 1, "keep": None}
    return write_recipe(
        {**sections, "model": model, "training": training, "checkpoints": saved},
        tmp_path / "tiny.yaml",
    )


def forget_after(run, step):
    """Take away what came after this step, as if the run had been killed there."""
    for folder in [run / "final", *run.glob("checkpoint-*")]:
        if folder.name == "final" or int(folder.name.split("-")[1]) > step:
            shutil.rmtree(folder)
    (run / "status.json").unlink()


def differences(one: Path, other: Path, *, ignored: tuple[str, ...] = SAID_OTHERWISE) -> list[str]:
    """Every tensor, number and file in which two checkpoints differ: weights, moments, schedule, random numbers, place
    in the data."""
    if (one / "latest").exists():
        import_module("deepspeed")  # whose classes are in its files
    names, others = (
        {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        - {*ignored}
        for folder in (one, other)
    )
    found = [f"{name}: in one only" for name in names ^ others]
    for name in sorted(names & others):
        if name.endswith((".pt", ".pth")):
            found += [
                f"{name}{place}"
                for place in differing(load_data(one / name), load_data(other / name))
            ]
        elif (one / name).read_bytes() != (other / name).read_bytes():
            found.append(name)
    return found


def differing(one, other, place=""):
    """The places in which two values differ."""
    if type(one) is not type(other):
        return [place]
    if isinstance(one, dict):
        keys = [] if one.keys() == other.keys() else [f"{place} keys"]
        return keys + [
            inner
            for key in one.keys() & other.keys()
            for inner in differing(one[key], other[key], f"{place}/{key}")
        ]
    if isinstance(one, list | tuple) and len(one) == len(other):
        return [
            inner
            for number, pair in enumerate(zip(one, other, strict=True))
            for inner in differing(*pair, f"{place}/{number}")
        ]
    if isinstance(one, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [place]
    if isinstance(one, np.ndarray):
        return [] if np.array_equal(one, other) else [place]
    if type(one).__module__.startswith("deepspeed.") and "__dict__" in dir(one):
        return differing(vars(one), vars(other), place)
    return [] if one == other else [place]
