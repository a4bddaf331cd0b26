"""A program for `fake_cuda.run_program`: train shipped recipes on a fake GPU, and what they did there.

It reads a request, {"distinct": bool, "recipes": names (none: by `distinct`), "steps": number, "layers": of each
kind}, and prints a result for each recipe, which has `error`, or what `Watch` and `Checks` found.
"""

import gc
import json
import logging
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from example_runs import Endless, Prepared
from fake_cuda import fake_gpu
from shipped_setups import (
    FOLDER,
    TEACHER,
    different_recipes,
    distinct_recipes,
    rows_of,
    setup_of,
    shipped_recipes,
    small_recipe,
)
from tiny_models import make_tokenizer
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from triton.runtime.jit import JITFunction

from cpt.models.config import config_from
from cpt.models.fused_loss import PADDED_TO, add_product, cross_entropy_in_place
from cpt.optim.adamw_update import adamw_update
from cpt.planning.fake_model import PeakOfStorages
from cpt.planning.workload import read_setup
from cpt.recipe.schema import Recipe
from cpt.stages.build import stage_trainer
from cpt.stages.examples import ExampleTrainer
from cpt.stages.models import model_for
from cpt.training.arguments import training_arguments

KERNELS = "cpt"  # namespace of the operations that launch Triton on a GPU
NAMESPACES_OF_TORCH = ("aten", "prims", "prim")
OPERATIONS = (adamw_update, add_product, cross_entropy_in_place)
GPU_BRANCHES = {f"{KERNELS}::{operation._name}": operation._init_fn for operation in OPERATIONS}
READ = torch.ops.aten._local_scalar_dense.default
MOST_HEADS = 256  # attention has sums in fp32, a row for each head: as wide as logits where a batch has as many tokens
SHARE = 4  # of the positions of a mask that `nonzero` finds, since fake tensors have no values


class Done(Exception):  # noqa: N818 - it is no error
    """Ends the training before anything is saved."""


class Watch(PeakOfStorages):
    """Bytes on the GPU, launches of kernels, reads of values, and logits in fp32."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.logit_widths = {vocabulary, -(-vocabulary // PADDED_TO) * PADDED_TO}
        self.kernels: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.fp32_logit_rows = 0

    def watch_on_gpu(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:  # the storage of a fake tensor is on the meta device
            self.watch(tensor.untyped_storage())

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function is READ:
            return self.value_of(arguments[0])
        if function is torch.ops.aten.nonzero.default:
            return self.positions_of(arguments[0])
        if function in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            arguments = (arguments[0], self.positions_for(arguments[1]), *arguments[2:])
        if function.namespace not in NAMESPACES_OF_TORCH:
            check_devices(function, arguments)
        if function.namespace == KERNELS:
            GPU_BRANCHES[function.name()](*arguments, **(options or {}))
        result = function(*arguments, **(options or {}))
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                self.watch_on_gpu(leaf)
                self.note_logits(leaf)
        return result

    def value_of(self, tensor: torch.Tensor) -> float | int | bool:
        """One, for whoever reads a value."""
        if tensor.is_cuda:
            self.reads[reader()] += 1
        return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1

    def positions_of(self, mask: torch.Tensor) -> torch.Tensor:
        self.reads[reader()] += 1
        return mask.new_empty(max(1, mask.numel() // SHARE), mask.dim(), dtype=torch.int64)

    def positions_for(self, indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Indices with positions instead of masks."""
        found: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool:
                found += self.positions_of(index).unbind(1)
            else:
                found.append(index)
        return found

    def note_logits(self, tensor: torch.Tensor) -> None:
        if (
            tensor.dtype != torch.float32
            or not tensor.dim()
            or tensor.shape[-1] not in self.logit_widths
        ):
            return
        rows = tensor.numel() // tensor.shape[-1]
        if rows > MOST_HEADS:
            self.fp32_logit_rows = max(self.fp32_logit_rows, rows)


def check_devices(function: Any, arguments: Any) -> None:
    """FakeTensorMode compares the devices of torch's own operations only."""
    devices = {str(tensor.device) for tensor in arguments if isinstance(tensor, torch.Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"{function}: tensors on {', '.join(sorted(devices))}")


def note_launch(
    kernel: Any, watch: Watch, *arguments: Any, grid: Any, warmup: bool, **options: Any
) -> None:
    """Replaces Triton's launch: a kernel takes addresses, so tensors of any size must be on the GPU."""
    watch.kernels[kernel.fn.__name__] += 1
    named = kernel.signature.bind_partial(*arguments)
    given = named.arguments | options
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and not value.is_cuda:
            raise RuntimeError(
                f"{kernel.fn.__name__}: {name} is on the {value.device}, the kernel on the GPU"
            )
    blocks = grid(given) if callable(grid) else grid
    assert all(0 < number < 2**31 for number in blocks), f"{kernel.fn.__name__}: grid {blocks}"


def reader() -> str:
    """The function of cpt, or of a library, that reads a value."""
    frames = [frame for frame in traceback.extract_stack() if not is_torchs(frame)]
    frame = [frame for frame in frames if Path(__file__).parent != Path(frame.filename).parent][-1]
    return f"{Path(frame.filename).name}:{frame.name}"


class Checks(TrainerCallback):
    """The trainer's tensors before each update, and its end after some steps."""

    def __init__(self, trainer: Any, watch: Watch, steps: int) -> None:
        self.trainer, self.watch, self.steps = trainer, watch, steps
        self.gradients: Counter[str] = Counter()
        self.wrong: list[str] = []
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.note_gradient(name))

    def note_gradient(self, name: str) -> Any:
        def note(parameter: torch.Tensor) -> None:
            wanted = parameter.grad_dtype or parameter.dtype
            if parameter.grad.device.type != "cuda" or parameter.grad.dtype != wanted:
                self.wrong.append(
                    f"{name}: gradient {parameter.grad.dtype} on {parameter.grad.device}, not {wanted}"
                )
            self.gradients[name] += 1

        return note

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loss = self.trainer.checked_step.loss
        self.check_scalar("loss", loss)
        if "norm" in vars(self.trainer.checked_step):
            self.check_scalar("norm", self.trainer.checked_step.norm)

    def check_scalar(self, name: str, scalar: torch.Tensor) -> None:
        if scalar.device.type != "cuda" or scalar.dtype != torch.float32 or scalar.dim():
            self.wrong.append(
                f"the {name} is {scalar.dtype} {list(scalar.shape)} on {scalar.device}"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.steps:
            raise Done
        self.watch.peak = self.watch.now


class RealRows:
    """The loader, whose rows have values: only what is on the GPU is fake."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        batches = iter(self.loader)
        while True:
            with unset_fake_temporarily():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


def train(path: Path, folder: Path, *, steps: int, layers: int) -> dict[str, Any]:
    recipe = small_recipe(path, folder, layers)
    if TEACHER in recipe.training:
        save_teacher(folder / "teacher", vocabulary=config_from(recipe.model.config).vocab_size)
        recipe.training[TEACHER] = str(folder / "teacher")
    form, rows = rows_of(recipe)
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    data = Prepared(Endless(rows), form, 10**6, num_tokens=10**9)
    example_rows = patch.object(
        ExampleTrainer, "placeholder_for", with_values(ExampleTrainer.placeholder_for)
    )
    with fake_gpu(), example_rows:
        arguments = training_arguments(recipe, folder / recipe.name, data)
        model = model_for(recipe, tokenizer, arguments)
        trainer = stage_trainer(recipe, model, tokenizer, data, arguments)
        trainer.remove_callback(PrinterCallback)
        make_loader = trainer.get_train_dataloader
        trainer.get_train_dataloader = lambda: RealRows(make_loader())
        watch = Watch(trainer.model.config.get_text_config().vocab_size)
        with watch, patch.object(JITFunction, "run", partialmethod(note_launch, watch)):
            checks = Checks(trainer, watch, steps)
            trainer.add_callback(checks)
            for tensor in (*trainer.model.parameters(), *trainer.model.buffers()):
                watch.watch_on_gpu(tensor)
            with suppress(Done):
                trainer.train()
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        return {
            "wrong": [*checks.wrong, *unplanned_dtypes(recipe, model)],
            "without_gradient": [name for name in trained if not checks.gradients[name]],
            "fp32_logit_rows": watch.fp32_logit_rows,
            "kernels": watch.kernels,
            "reads": watch.reads,
            "peak": watch.peak,
            "on_cpu": [name for name, tensor in model.named_parameters() if not tensor.is_cuda],
        }


def unplanned_dtypes(recipe: Recipe, model: Any) -> list[str]:
    """Parameters that take other bytes than `cpt plan` counts: adapters 4, others as the recipe's weights."""
    planned, wrong = read_setup(recipe, 1, None, attention="sdpa").weights_bytes, []
    for name, parameter in model.named_parameters():
        wanted = 4 if recipe.model.lora is not None and parameter.requires_grad else planned
        if parameter.itemsize != wanted:
            wrong.append(f"{name}: {parameter.itemsize} bytes, not {wanted}")
    return wrong


def with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, outside of the fake mode."""

    def call(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments)

    return call


def save_teacher(folder: Path, vocabulary: int) -> None:
    shape = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = AutoConfig.for_model("llama", vocab_size=vocabulary, **shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def short_trace(problem: Exception) -> str:
    """Without torch's frames; the last one was in cpt or a library."""
    frames = [
        frame for frame in traceback.extract_tb(problem.__traceback__) if not is_torchs(frame)
    ]
    places = [f"{frame.filename}:{frame.lineno} {frame.line}" for frame in frames[-6:]]
    return "\n".join([*places, f"{type(problem).__name__}: {str(problem)[:500]}"])


def is_torchs(frame: traceback.FrameSummary) -> bool:
    return "/site-packages/torch/" in frame.filename


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    request = json.load(sys.stdin)
    every = distinct_recipes() if request["distinct"] else different_recipes()
    for path in [FOLDER / name for name in request["recipes"]] or every:
        gc.collect()
        gc.freeze()  # the Trainer collects garbage in each run, and the libraries' objects are none
        began = time.process_time()
        name, setup = str(path.relative_to(FOLDER)), str(setup_of(shipped_recipes()[path]))
        result: dict[str, Any] = {"recipe": name, "setup": setup}
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            try:
                result |= train(
                    path, Path(folder), steps=request["steps"], layers=request["layers"]
                )
            except Exception as problem:  # noqa: BLE001 - it is the result
                result["error"] = short_trace(problem)
        result["seconds"] = round(time.process_time() - began, 2)
        print(json.dumps(result), flush=True)
    print(json.dumps({"seconds": round(time.process_time(), 2)}), flush=True)


if __name__ == "__main__":
    main()
