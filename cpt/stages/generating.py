"""Stages that train on sampled completions: indexed prompts, completions that survive interruptions, rewards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import TrainOutput
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model, split_tensor_dict

from cpt.checkpoints.load import written_for
from cpt.checkpoints.model_folder import load_data
from cpt.data.rows.loader import CPTDataLoader
from cpt.distributed import world_size
from cpt.errors import ResourceError
from cpt.hf_internals import SamplingHooks
from cpt.recipe.schema import Recipe
from cpt.stages.examples import ExampleTrainer, fit_fused_head
from cpt.stages.models import prepared
from cpt.stages.rewards import build_rewards
from cpt.training.generations import Generations, Prompt, PromptRows
from cpt.training.restart import is_out_of_memory
from cpt.training.trainer import to_device

STAGE_FILE = "stage_state.pt"


class PromptTrainer(SamplingHooks, ExampleTrainer):
    """Rows are prompts: each micro-batch gets those of its generation, and TRL's trainer answers them."""

    args: Any  # the stage's own config

    @property
    def generations(self) -> Generations:
        """The distribution of prompts, for the current micro-batches."""
        raise NotImplementedError

    def get_train_dataloader(self) -> CPTDataLoader:
        arguments = self.args
        plan = self.generations
        workers = arguments.dataloader_num_workers
        world = arguments.world_size
        items_of_step = plan.accumulation * world
        return CPTDataLoader(
            PromptRows(self.rows, plan, world, self.rows_of_steps.left_out),  # type: ignore[arg-type]
            micro_batch=1,
            rows_in_all=self.length.steps * items_of_step,
            rank=arguments.process_index,
            world_size=world,
            first_row=self.first_step * items_of_step,
            num_workers=workers,
            persistent_workers=arguments.dataloader_persistent_workers,
            prefetch_factor=arguments.dataloader_prefetch_factor if workers else None,
            collate_fn=itemgetter(0),  # a micro-batch is one item
        )

    def part_of_process(self, batch: Any) -> Any:
        """Return this process's equal share of a list or tensor."""
        size = len(batch) // self.args.world_size
        return batch[self.args.process_index * size :][:size]

    def _run_epoch(self, **options: Any) -> None:  # type: ignore[override]
        """Restore TRL's count of micro-batches on resume."""
        self.micro_batches_done = self.first_step * self.generations.accumulation
        super()._run_epoch(**options)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the FLOPs of training on the completions, without sampling."""
        if self.sampled_batches is None or not isinstance(inputs, list):
            return 0
        used = self.sampled_batches[(self.micro_batches_done - 1) % len(self.sampled_batches)]
        ids = torch.cat((used["prompt_ids"], used["completion_ids"]), dim=1)
        return super().floating_point_ops({"input_ids": ids})

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Evaluate with a separate random state, so that the run's does not change."""
        device = self.args.device
        devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
        with torch.random.fork_rng(devices=devices, device_type=kind):
            torch.manual_seed(self.seed_of_step)
            return super().evaluate(*arguments, **options)


class StepsOfPrompts(PromptTrainer):
    """For TRL's DistillationTrainer (arXiv 2306.13649). Each step samples new answers, so none are saved."""

    @property
    def generations(self) -> Generations:
        """All micro-batches of a step are one generation."""
        arguments = self.args
        rows = (
            arguments.per_device_train_batch_size
            * arguments.gradient_accumulation_steps
            * arguments.world_size
        )
        return Generations(
            rows, arguments.gradient_accumulation_steps, arguments.gradient_accumulation_steps
        )

    def inputs_of_process(self, inputs: Any) -> Any:
        """Return the prompts of the whole step; each process answers its share at the first micro-batch."""
        if isinstance(inputs, list) and self.model.training:
            return self.part_of_process(inputs)
        return inputs


class GenerationBatches(PromptTrainer):
    """Mixin for TRL's GRPOTrainer or RLOOTrainer, which generate, score and train.

    Args:
        reference: the model that `beta` keeps the trained model close to; None without `beta`, or if it is the model
            without its adapter.
    """

    prompts: Sequence[Prompt] = ()  # of the last generation, over all processes
    last: dict[str, torch.Tensor] | None = (
        None  # this process's last completions, for a stage that compares with them
    )

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        arguments: Any,
        *,
        reference: nn.Module | None,
        **options: Any,
    ) -> None:
        rewards = build_rewards(
            recipe.rewards, [name for name in options["rows"][0] if name != "prompt"]
        )
        self.unscored = rewards[0].unscored
        arguments.reward_weights = [reward.weight for reward in recipe.rewards]
        # With `beta` TRL would load a reference by the model's name, which may not exist.
        beta = arguments.beta
        arguments.beta = 0.0
        try:
            super().__init__(recipe, model, arguments, reward_funcs=rewards, **options)
        finally:
            self.beta = arguments.beta = beta
        self.ref_model = None if reference is None else self.ready_reference(reference)

    def ready_reference(self, reference: Any) -> Any:
        arguments = self.args
        if arguments.disable_dropout:
            disable_dropout_in_model(reference)
        add_fused_lm_head(
            reference,
            temperature=arguments.temperature,
            cast_lm_head_to_fp32=vars(arguments).get("cast_lm_head_to_fp32", False),
        )
        fit_fused_head(reference)
        return prepared(reference, self)

    # --- prompts -----------------------------------------------------------------------------------------------------

    @property
    def generations(self) -> Generations:
        config = self.args
        prompts = config.generation_batch_size // config.num_generations
        micro_batches = config.steps_per_generation * config.num_iterations
        return Generations(prompts, micro_batches, config.gradient_accumulation_steps)

    def inputs_of_process(self, inputs: Any) -> Any:
        """After the last completions are used up, return this process's prompts, each repeated once per answer."""
        if isinstance(inputs, list):
            is_new = (
                self.micro_batches_done % self.generations.micro_batches == 0
                or self.sampled_batches is None
            )
            if self.model.training and is_new:
                self.prompts = inputs
                return self.share_of(inputs)
        return inputs

    def share_of(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        repeated = []
        for prompt in prompts:
            for _ in range(self.args.num_generations):
                repeated.append(prompt)
        return list(map(dict, self.part_of_process(repeated)))

    # --- resuming ----------------------------------------------------------------------------------------------------

    def train(  # type: ignore[override]
        self, resume_from_checkpoint: str | Path | None = None, **options: Any
    ) -> TrainOutput:
        """Train, resuming completions if the checkpoint is within a generation and micro-batches did not grow.

        Completions are sampled again if the number of processes differs or micro-batches were larger.
        """
        if resume_from_checkpoint is not None:
            checkpoint = Path(resume_from_checkpoint)
            arguments = self.args
            path = checkpoint / self.generation_file
            same = path.exists() and written_for(checkpoint) in (None, arguments.world_size)
            saved: dict[str, Any] = load_data(path) if same else {}
            self.sampled_batches = None
            buffered = saved.pop("buffered", None)
            if buffered is not None and arguments.steps_per_generation % len(buffered) == 0:
                parts = arguments.steps_per_generation // len(buffered)
                batches = [to_device(batch, arguments.device) for batch in buffered]
                self.sampled_batches = []
                for batch in batches:
                    self.sampled_batches += split_tensor_dict(batch, parts)
            last = saved.get("last")
            self.last = None if last is None else to_device(last, arguments.device)
            if (checkpoint / STAGE_FILE).exists():  # missing if another program wrote it
                self.restore_own(load_data(checkpoint / STAGE_FILE))
        output = super().train(resume_from_checkpoint, **options)
        self.unscored.check_end()
        return output

    def stage_states(self) -> dict[str, Any]:
        is_within = (
            self.state.global_step * self.generations.accumulation % self.generations.micro_batches
            != 0
        )
        of_process = {"buffered": self.sampled_batches if is_within else None, "last": self.last}
        states: dict[str, Any] = {}
        if any(value is not None for value in of_process.values()):
            states[self.generation_file] = of_process
        if self.args.should_save and (states_of_stage := self.own_state()):
            states[STAGE_FILE] = states_of_stage
        return states

    @property
    def generation_file(self) -> str:
        if self.args.world_size <= 1:
            return "generation.pt"
        return f"generation_{self.args.process_index}.pt"

    def on_rollback(self) -> None:
        """Sample again: stored completions may answer prompts that are now skipped."""
        self.sampled_batches = None

    def own_state(self) -> dict[str, Any]:
        """The stage's state for a checkpoint, equal on all processes."""
        return {}

    def restore_own(self, state: Mapping[str, Any]) -> None:
        """Restore the stage's state."""

    # --- safety ------------------------------------------------------------------------------------------------------

    def metrics_to_check(self, metrics: torch.Tensor) -> torch.Tensor:
        """Check only whether both are finite.

        The size of a loss is meaningless here: advantages have no level, and probability ratios are unbounded. Steps
        without gradients are common (all answers equally good), followed by a step with some. So loss and gradient
        must be finite, and clipping limits large gradients; without clipping the norm is checked as in other stages.
        """
        loss, norm = metrics
        clipped = norm if self.args.max_grad_norm <= 0 else norm * 0
        return torch.stack((loss * 0, clipped))

    def sample(self, generate: Callable[[], Any]) -> Any:
        """Sample completions; out of memory becomes a ResourceError, as smaller micro-batches would not help."""
        try:
            return generate()
        except RuntimeError as problem:
            if not is_out_of_memory(problem):
                raise
            raise ResourceError(
                f"out of memory in step {self.state.global_step + 1}, sampling {self.args.generation_batch_size}"
                f" completions of up to {self.args.max_completion_length} tokens. Lower"
                " `training.generation_batch_size`, `steps_per_generation` or `max_completion_length`."
            ) from problem

    def metrics_of_batch(self, rows: list[Any]) -> dict[str, float]:
        """TRL's metrics only; each prompt is answered `num_generations_eval` times."""
        answers = self.args.num_generations_eval or self.args.num_generations
        self.prepare_inputs([row for row in rows for _ in range(answers)])
        return {}


class Groups(GenerationBatches):
    """For GRPO."""

    use_adaptive_entropy: bool
    entropy_coef: float
    _last_world_entropy: float

    def own_state(self) -> dict[str, Any]:
        if self.use_adaptive_entropy:
            return {"entropy": [self.entropy_coef, self._last_world_entropy]}
        return {}

    def restore_own(self, state: Mapping[str, Any]) -> None:
        self.entropy_coef, self._last_world_entropy = state["entropy"]


@dataclass
class SingleAnswers(GRPOConfig):  # type: ignore[misc]
    """GRPOConfig with one answer to each prompt."""

    num_generations: int | None = 1
    least_deviation: float = 0.1
    """Lower bound of the deviation by which advantages are divided. If all answers are right, only the values' errors
    remain; scaled up to normal size, they would unlearn the answers."""

    def __post_init__(self) -> None:
        answers = self.num_generations
        if (
            answers == 1
        ):  # GRPOConfig needs a group to compare: the whole batch, normalized together
            steps = self.steps_per_generation or self.gradient_accumulation_steps
            at_once = self.per_device_train_batch_size * world_size()
            self.num_generations = int(self.generation_batch_size or at_once * steps)
        super().__post_init__()
        self.num_generations = answers


class RewardedTrainer(GenerationBatches, GRPOTrainer):  # type: ignore[misc]
    """GRPO up to the rewards; the stage computes advantages from them."""

    rewards_of_all: torch.Tensor

    def note_rewards(self, rewards: torch.Tensor) -> None:
        """Store the weighted sums of rewards, NaN if no reward applies."""
        self.rewards_of_all = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        self.rewards_of_all[rewards.isnan().all(dim=1)] = torch.nan

    def scored(self, inputs: list[dict[str, Any]], outputs: dict[str, Any]) -> dict[str, Any]:
        if self.model.training:
            return outputs | self.advantages_of(inputs, outputs)
        return outputs

    def advantages_of(
        self, inputs: list[dict[str, Any]], outputs: dict[str, Any]
    ) -> dict[str, Any]:
        """`advantages` ([B], or [B, T] for each token), and further inputs of the loss."""
        raise NotImplementedError

    def log_probabilities(self, outputs: dict[str, Any]) -> torch.Tensor:
        """Return log-probabilities [B, T] of the completions' tokens under the current model."""
        ids = torch.cat((outputs["prompt_ids"], outputs["completion_ids"]), dim=1)
        mask = torch.cat((outputs["prompt_mask"], outputs["completion_mask"]), dim=1)
        # recomputing activations is useless without gradients
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
        ):
            size = self.args.per_device_train_batch_size
            return self.score_tokens(
                self.model, ids, mask, outputs["completion_ids"].size(1), batch_size=size
            )

    def add_metric(self, name: str, value: float) -> None:
        """Add a value to the next log, which shows the mean."""
        self.trl_metrics["train"][name].append(value)
