"""Every private name of transformers, TRL, peft, accelerate and the libraries around them that cpt uses, with its
reason; `USED` is the contract that a test checks.

Read in transformers 5.17, 5.23 and 5.24, TRL 1.16, peft 0.21, accelerate 1.15.
"""

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel, Trainer
else:  # keeps this file cheap to import: the mixins below are combined with library classes
    Trainer = object

IGNORED = -100  # label of a position without a loss, for transformers and torch
LOOP = "a public hook around it"
USED = {  # dotted name -> its parameters ("" if not called), the reason, what would replace it
    "transformers.PreTrainedModel._keep_in_fp32_modules": (
        "",
        "parts that are never in fp16",
        "a public list",
    ),
    "transformers.PreTrainedModel._keep_in_fp32_modules_strict": (
        "",
        "the same for bf16 too",
        "a public list",
    ),
    "transformers.PreTrainedModel._supports_sdpa": (
        "",
        "attention of a family",
        "a public list of them",
    ),
    "transformers.Trainer._prepare_for_training": (
        "max_steps, train_dataloader, resume_from_checkpoint",
        "FSDP2, universal checkpoints and untrusted pickles are loaded by cpt, after wrapping",
        LOOP,
    ),
    "transformers.Trainer._load_from_checkpoint": (
        "resume_from_checkpoint, model",
        "read pickles as data only",
        LOOP,
    ),
    "transformers.Trainer._issue_warnings_after_load": (
        "load_result",
        "it warns about a tied head, which has the weights of the embedding",
        "a check of tied weights",
    ),
    "transformers.Trainer._get_num_items_in_batch": (
        "batch_samples, device",
        "transformers copies the count to the GPU, for which the host waits",
        "a fill on the GPU",
    ),
    "transformers.Trainer._run_epoch": (
        "",
        "restart after out-of-memory; a stop before the first step",
        LOOP,
    ),
    "transformers.Trainer._save_checkpoint": ("model, trial", "a save is one transaction", LOOP),
    "transformers.Trainer._save": (
        "output_dir, state_dict",
        "the model's part of that transaction",
        LOOP,
    ),
    "transformers.Trainer._tr_loss": (
        "",
        "a skipped step's loss does not count",
        "a public running loss",
    ),
    "transformers.Trainer._created_lr_scheduler": (
        "",
        "set as by its own method, so that it removes the schedule after training",
        "a public way to give it a schedule",
    ),
    "trl.trainer.base_trainer._BaseTrainer._send_telemetry": (
        "",
        "cpt sends no telemetry",
        "an argument for it",
    ),
    "trl.SFTTrainer._prepare_dataset": (
        "dataset",
        "rows are tokenized already",
        "an argument for it",
    ),
    "trl.GRPOTrainer._prepare_inputs": (
        "",
        "indexed prompts, completions that survive a stop",
        LOOP,
    ),
    "trl.GRPOTrainer._generate_single_turn": (
        "",
        "name the remedy when sampling is out of memory",
        LOOP,
    ),
    "trl.GRPOTrainer._calculate_rewards": ("", "PPO and SPO need each reward", LOOP),
    "trl.GRPOTrainer._generate_and_score_completions": (
        "inputs",
        "PPO and SPO compute other advantages",
        LOOP,
    ),
    "trl.GRPOTrainer._get_per_token_logps_and_entropies": (
        "model, input_ids, attention_mask, logits_to_keep, batch_size",
        "values of the same states; log-probabilities before the first step",
        LOOP,
    ),
    "trl.GRPOTrainer._compute_loss": (
        "model, inputs",
        "add the values' loss to the policy's",
        LOOP,
    ),
    "trl.GRPOTrainer._metrics": ("", "a stage's metrics in TRL's log", "a public way to add one"),
    "trl.GRPOTrainer._buffered_inputs": (
        "",
        "a checkpoint within a generation has its completions",
        "TRL saves them",
    ),
    "trl.GRPOTrainer._last_world_entropy": (
        "",
        "a checkpoint has the state of the adaptive entropy bonus",
        "TRL saves it",
    ),
    "trl.GRPOTrainer._step": ("", "the count of micro-batches on resume", "TRL restores it"),
    "trl.experimental.cpo.CPOTrainer._stored_metrics": (
        "",
        "metrics of an evaluation",
        "`_metrics` there too",
    ),
    "transformers.PreTrainedModel._keys_to_ignore_on_save": (
        "",
        "a value head is not exported",
        "a public list",
    ),
    "transformers.PreTrainedConfig._attn_implementation": (
        "",
        "attention of a model",
        "a public property",
    ),
    "atexit._run_exitfuncs": (
        "",
        "trackers finish before `os.execve` and `os._exit`",
        "a public way to run them",
    ),
    "os._exit": (
        "status",
        "exit without Python's shutdown, in which gloo hangs",
        "gloo ends cleanly",
    ),
    "transformers.cli.serve.Serve._thread": (
        "",
        "whether the server still runs",
        "a public wait for its end",
    ),
    "optuna.trial.FrozenTrial._trial_id": (
        "",
        "continue a trial of an earlier process",
        "a public way to do so",
    ),
    "transformers.PreTrainedModel._supports_flash_attn": (
        "",
        "attention of a family",
        "a public list of them",
    ),
    "transformers.PreTrainedModel._supports_flex_attn": (
        "",
        "attention of a family",
        "a public list of them",
    ),
    "transformers.PreTrainedModel._can_set_experts_implementation": (
        "",
        "see SettableExperts",
        "a public flag",
    ),
    "transformers.modeling_flash_attention_utils._flash_attention_forward": (
        "query_states, key_states, value_states, attention_mask, query_length, is_causal, softmax_scale, "
        "sliding_window, attn_implementation, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k",
        "call flash-attn with the bounds of documents",
        "torch's varlen_attn as fast as flash-attn 3 on Hopper",
    ),
    "transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref": (
        "",
        "see without_zero3",
        "a public getter",
    ),
}


def supports_sdpa(model: "PreTrainedModel | type[PreTrainedModel]") -> bool:
    """Whether the family of this model supports torch's fused attention."""
    return bool(model._supports_sdpa)


def supports_flash(model: "type[PreTrainedModel]") -> bool:
    return bool(model._supports_flash_attn)


def supports_flex(model: "type[PreTrainedModel]") -> bool:
    return bool(model._supports_flex_attn)


class SettableExperts:
    """Mixin of models whose experts are in another file: transformers searches the class's file for its decorator."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True


def flash_attention(
    package: str,
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    bounds: Any,
    longest: int,
    scale: float,
    window: int | None,
) -> "torch.Tensor":
    """Call a flash-attn kernel, within the documents between `bounds`: [1, tokens, heads, width]."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    output: torch.Tensor = _flash_attention_forward(
        query,
        key,
        value,
        None,
        query_length=query.shape[1],
        is_causal=True,
        softmax_scale=scale,
        sliding_window=window,
        attn_implementation=package,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=longest,
        max_length_k=longest,
    )
    return output


@contextmanager
def without_zero3() -> Iterator[None]:
    """Make transformers build plain models although the run uses ZeRO-3; restore DeepSpeed's config afterwards."""
    from transformers.integrations import deepspeed, is_deepspeed_zero3_enabled

    if not is_deepspeed_zero3_enabled():
        yield
        return
    config = deepspeed._hf_deepspeed_config_weak_ref()  # type: ignore[misc]
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed.set_hf_deepspeed_config(config)


def attention_of(config: Any) -> str:
    """Return transformers' name of a built model's attention implementation."""
    return str(config._attn_implementation)


def leave_out_of_saves(model: "nn.Module", names: set[str]) -> None:
    owner: Any = model
    owner._keys_to_ignore_on_save = {*(owner._keys_to_ignore_on_save or ()), *names}


def run_exit_functions() -> None:
    """Run the functions registered with atexit."""
    atexit._run_exitfuncs()


def exit_now(code: int) -> NoReturn:
    os._exit(code)


def loss_since_log(trainer: "Trainer") -> "torch.Tensor":
    """The sum of losses since the last log; the Trainer adds to it in place."""
    loss: torch.Tensor = trainer._tr_loss
    return loss


def write_model_files(
    trainer: "Trainer", folder: str, weights: "dict[str, torch.Tensor] | None"
) -> None:
    """Write the model with these weights or else its own, its config and the tokenizer, as the Trainer does."""
    trainer._save(folder, weights)


class ExampleHooks(Trainer):
    """Public names for the private methods of every TRL trainer."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        """Rows are tokenized already."""
        return dataset

    def _send_telemetry(self) -> None:
        """cpt sends no telemetry."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(self.inputs_of_process(inputs))

    def inputs_of_process(self, inputs: Any) -> Any:
        """Return this process's part of a batch."""
        return inputs

    def prepare_inputs(self, inputs: Any) -> Any:
        """Return the batch on this process's device; for a sampling stage, its completions."""
        return self._prepare_inputs(inputs)

    @property
    def trl_metrics(self) -> dict[str, dict[str, list[float]]]:
        """TRL's metrics since the last log, by `train` and `eval`; empty if it has none."""
        stored: dict[str, dict[str, list[float]]] = vars(self).get("_metrics") or vars(self).get(
            "_stored_metrics", {}
        )
        return stored


class SamplingHooks(Trainer):
    """The same for TRL's trainers that sample."""

    _step: int
    _buffered_inputs: list[dict[str, Any]] | None

    @property
    def micro_batches_done(self) -> int:
        """TRL's count of micro-batches."""
        return self._step

    @micro_batches_done.setter
    def micro_batches_done(self, number: int) -> None:
        self._step = number

    @property
    def sampled_batches(self) -> list[dict[str, Any]] | None:
        """The micro-batches of the generation in use."""
        return self._buffered_inputs

    @sampled_batches.setter
    def sampled_batches(self, batches: list[dict[str, Any]] | None) -> None:
        self._buffered_inputs = batches

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
        return self.sample(partial(super()._generate_single_turn, *arguments, **options))  # type: ignore[misc]

    def sample(self, generate: Callable[[], Any]) -> Any:
        return generate()

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> "torch.Tensor":
        rewards: torch.Tensor = super()._calculate_rewards(*arguments, **options)  # type: ignore[misc]
        self.note_rewards(rewards)
        return rewards

    def note_rewards(self, rewards: "torch.Tensor") -> None:
        """Each reward [B, rewards] of the completions of all processes; NaN if it does not apply."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        outputs: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        return self.scored(inputs, outputs)

    def scored(self, inputs: list[dict[str, Any]], outputs: dict[str, Any]) -> dict[str, Any]:
        """A generation with its advantages."""
        return outputs

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Any, mask: Any, logits_to_keep: int, *more: Any, **options: Any
    ) -> Any:
        score = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        forward = partial(score, model, ids, mask, logits_to_keep, *more, **options)
        return self.forward_completions(forward, logits_to_keep)

    def forward_completions(self, forward: Callable[[], Any], logits_to_keep: int) -> Any:
        """Log-probabilities and entropies of the last `logits_to_keep` tokens."""
        return forward()

    def score_tokens(
        self, model: Any, ids: Any, mask: Any, logits_to_keep: int, *, batch_size: int
    ) -> "torch.Tensor":
        """Log-probabilities [B, T] of the last `logits_to_keep` tokens."""
        log_probabilities_of_tokens, *_ = self._get_per_token_logps_and_entropies(
            model, ids, mask, logits_to_keep, batch_size=batch_size
        )
        log_probabilities: torch.Tensor = log_probabilities_of_tokens
        return log_probabilities

    def _compute_loss(self, model: Any, inputs: dict[str, Any], *more: Any) -> "torch.Tensor":
        return self.loss_of_completions(super()._compute_loss(model, inputs, *more), inputs)  # type: ignore[misc]

    def loss_of_completions(
        self, policy_loss: "torch.Tensor", inputs: dict[str, Any]
    ) -> "torch.Tensor":
        return policy_loss


def keys_ignored_on_save(model: "nn.Module") -> set[str]:
    """Return the parameters that `save_pretrained` omits for this model."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def server_thread(serve: Any) -> Thread:
    """Return the thread in which `transformers serve` answers requests."""
    thread: Thread = serve._thread
    return thread


def trial_id(trial: Any) -> int:
    """Return Optuna's id of a trial, unique over all studies of its storage."""
    return int(trial._trial_id)


def modules_kept_in_fp32(model: "PreTrainedModel", dtype: "torch.dtype") -> set[str]:
    """Return parts of names of modules that `from_pretrained(..., dtype=dtype)` keeps in fp32."""
    names = set(model._keep_in_fp32_modules_strict or ())
    if str(dtype) == "torch.float16":
        return names | set(model._keep_in_fp32_modules or ())
    return names
