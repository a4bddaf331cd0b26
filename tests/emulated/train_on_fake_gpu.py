"""A program for `fake_cuda.run_program`: two steps of shipped recipes on a fake GPU, and what they did there.

Each request is the path of a recipe. Its result has `error`, or what `Watch` and `Checks` found.
"""

import json
import logging
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from example_runs import Endless, Prepared
from fake_cuda import fake_gpu
from shipped_setups import rows_of, setup_of, shipped_recipes, small_recipe
from tiny_models import make_tokenizer
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from cpt.models.fused_loss import PADDED_TO, FusedLoss
from cpt.planning.dry_run import PeakOfStorages, tree_leaves
from cpt.stages.build import stage_trainer
from cpt.stages.models import model_for
from cpt.training.arguments import training_arguments

KERNELS = "cpt"  # namespace of the operations that launch Triton
READ = torch.ops.aten._local_scalar_dense.default
SHARE = 4  # of the positions of a mask that `nonzero` finds, since fake tensors have no values


class TwoStepsDone(Exception):  # noqa: N818 - it is no error
    """The first step makes the optimizer's states."""


class Watch(PeakOfStorages):
    """Bytes on the GPU, launches of kernels, reads of values, and logits in fp32."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.logit_widths = {vocabulary, -(-vocabulary // PADDED_TO) * PADDED_TO}
        self.kernels: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.fp32_logit_rows = 0

    def watch(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "cuda":
            super().watch(storage)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is READ:
            return self.value_of(arguments[0])
        if function is torch.ops.aten.nonzero.default:
            return self.positions_of(arguments[0])
        if function.namespace == KERNELS:
            self.check_launch(function, arguments)
        result = super().__torch_dispatch__(function, types, arguments, options)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
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

    def check_launch(self, function: Any, arguments: Any) -> None:
        """A kernel takes addresses: tensors of any size must be on its GPU, one after the other in memory."""
        self.kernels[function._opname] += 1
        for number, tensor in enumerate(arguments):
            if isinstance(tensor, torch.Tensor) and not tensor.is_cuda:
                raise RuntimeError(f"{function}: argument {number} is on the {tensor.device}, the kernel on the GPU")

    def note_logits(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda and tensor.dtype == torch.float32 and tensor.dim() and tensor.shape[-1] in self.logit_widths:
            self.fp32_logit_rows = max(self.fp32_logit_rows, tensor.numel() // tensor.shape[-1])


def reader() -> str:
    """The function of cpt, or of a library, that reads a value."""
    frames = [frame for frame in traceback.extract_stack() if "/site-packages/torch/" not in frame.filename]
    frame = [frame for frame in frames if Path(__file__).parent != Path(frame.filename).parent][-1]
    return f"{Path(frame.filename).name}:{frame.name}"


class Checks(TrainerCallback):
    """The trainer's tensors before each update, and its end after two steps."""

    def __init__(self, trainer: Any, watch: Watch) -> None:
        self.trainer, self.watch = trainer, watch
        self.gradients: Counter[str] = Counter()
        self.wrong: list[str] = []
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.note_gradient(name))

    def note_gradient(self, name: str) -> Any:
        def note(parameter: torch.Tensor) -> None:
            wanted = parameter.grad_dtype or parameter.dtype
            if parameter.grad.device.type != "cuda" or parameter.grad.dtype != wanted:
                self.wrong.append(f"{name}: gradient {parameter.grad.dtype} on {parameter.grad.device}, not {wanted}")
            self.gradients[name] += 1

        return note

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loss = self.trainer.loss_since_log
        self.check_scalar("loss", loss)
        if "norm" in vars(self.trainer.guard):
            self.check_scalar("norm", self.trainer.guard.norm)

    def check_scalar(self, name: str, scalar: torch.Tensor) -> None:
        if scalar.device.type != "cuda" or scalar.dtype != torch.float32 or scalar.dim():
            self.wrong.append(f"the {name} is {scalar.dtype} {list(scalar.shape)} on {scalar.device}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise TwoStepsDone
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


def two_steps(path: Path, folder: Path) -> dict[str, Any]:
    recipe = small_recipe(path, folder)
    form, rows = rows_of(recipe)
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    data = Prepared(Endless(rows), form, 10**6, num_tokens=10**9)
    with fake_gpu():
        arguments = training_arguments(recipe, folder / recipe.name, data)
        model = model_for(recipe, tokenizer, arguments)
        trainer = stage_trainer(recipe, model, tokenizer, data, arguments)
        trainer.remove_callback(PrinterCallback)
        make_loader = trainer.get_train_dataloader
        trainer.get_train_dataloader = lambda: RealRows(make_loader())
        with Watch(trainer.model.config.get_text_config().vocab_size) as watch:
            checks = Checks(trainer, watch)
            trainer.add_callback(checks)
            for tensor in (*trainer.model.parameters(), *trainer.model.buffers()):
                watch.watch(tensor.untyped_storage())
            try:
                trainer.train()
            except TwoStepsDone:
                pass
        whole = model.get_base_model() if recipe.model.lora else model
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        return {
            "wrong": checks.wrong,
            "without_gradient": [name for name in trained if checks.gradients[name] < 2],
            "is_fused": isinstance(vars(whole).get("loss_function"), FusedLoss),
            "fp32_logit_rows": watch.fp32_logit_rows,
            "kernels": watch.kernels,
            "reads": watch.reads,
            "peak": watch.peak,
            "on_cpu": [name for name, tensor in model.named_parameters() if not tensor.is_cuda],
        }


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for line in sys.stdin:
        began, path = time.perf_counter(), Path(json.loads(line))
        result: dict[str, Any] = {"recipe": path.name, "setup": str(setup_of(shipped_recipes()[path]))}
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            try:
                result |= two_steps(path, Path(folder))
            except Exception:  # noqa: BLE001 - it is the result
                result["error"] = "".join(traceback.format_exc()[-3000:])
        result["seconds"] = round(time.perf_counter() - began, 2)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
