"""The effect of each key of Hugging Face's config classes in `training:`: one table of four lists.

A key is passed on to Hugging Face's code, has its effect by our code, is refused because the recipe has a key for it,
or is refused because it would have no effect. A test walks all keys of the installed versions.
"""

from collections.abc import Mapping
from typing import Any, Literal

from cpt.recipe.huggingface_keys import STAGE_CONFIGS
from cpt.recipe.tree import Location, dotted, steps_of

Fate = Literal["passed on", "ours", "moved", "no effect"]


def fate_of(key: str, stage: str) -> Fate | None:
    """Return what a key does in a stage; None for a key that is not in the table."""
    if recipe_key_of(key, stage) is not None:
        return "moved"
    if why_no_effect(key, stage) is not None:
        return "no effect"
    if key in OURS:
        return "ours"
    if key in PASSED_ON:
        return "passed on"
    return None


def why_refused(key: str, stage: str) -> str | None:
    """Return why `training:` cannot have the key and what to do, for recipes that were not read from a file."""
    recipe_key = recipe_key_of(key, stage)
    reason = why_no_effect(key, stage)
    if recipe_key is not None:
        return f"`training.{key}` does not belong here: write `{dotted(recipe_key)}`"
    return reason and f"`training.{key}` would have no effect: {reason}. Remove it"


def is_refused(key: str, value: object, stage: str) -> bool:
    no_effect = isinstance(value, str) and (key, value) in NO_EFFECT_OF_VALUE
    return no_effect or fate_of(key, stage) in ("moved", "no effect")


def had_no_effect(key: str, training: Mapping[str, Any]) -> bool:
    """Whether a key that is refused today had no effect in a run that an earlier version of cpt began."""
    if key in PUSHES.split():  # it uploaded the run's folder
        return not training.get("push_to_hub")
    return key not in MOVED


def accepted_keys(section: Mapping[str, Any], stage: str, above: str = "") -> dict[str, Any]:
    """Return a recipe's `training` without keys that are refused today."""
    accepted: dict[str, Any] = {}
    for name, value in section.items():
        key = f"{above}{name}"
        if key in NESTED and isinstance(value, Mapping):
            below = accepted_keys(value, stage, f"{key}.")
            if below:
                accepted[name] = below
        elif not is_refused(key, value, stage):
            accepted[name] = value
    return accepted


def recipe_key_of(key: str, stage: str) -> Location | None:
    """Return the recipe's key for it, if there is one."""
    if key not in MOVED and stage in STAGE_CONFIGS:
        return MOVED_OF_TRL.get(key)
    return MOVED.get(key)


def why_no_effect(key: str, stage: str) -> str | None:
    """Return the reason if the key would have no effect in a stage; custom stages may use TRL's keys."""
    if stage not in STAGE_CONFIGS:
        return NO_EFFECT.get(key)
    return NO_EFFECT.get(key) or NO_EFFECT_IN_STAGE.get((stage, key)) or NO_EFFECT_OF_TRL.get(key)


def by_word(table: Mapping[str, str]) -> dict[str, str]:
    """`{"lr": "optimizer.learning_rate"}` from `{"optimizer.learning_rate": "learning_rate lr"}`."""
    meanings: dict[str, str] = {}
    for meaning, listed in table.items():
        meanings |= dict.fromkeys(listed.split(), meaning)
    return meanings


def recipe_keys(table: Mapping[str, str]) -> dict[str, Location]:
    return {word: steps_of(key) for word, key in by_word(table).items()}


# --- 1: passed on unchanged, to code of Hugging Face that we do not replace ---

OF_TRAINER = """
    bf16 fp16 tf32 full_determinism debug ddp_bucket_cap_mb ddp_static_graph neftune_noise_alpha
    torch_empty_cache_steps
    include_num_input_tokens_seen skip_memory_metrics log_level log_level_replica log_on_each_node logging_first_step
    logging_steps logging_strategy hub_private_repo trackio_bucket_id trackio_space_id trackio_static_space_id
    label_smoothing_factor liger_kernel_config accelerator_config accelerator_config.gradient_accumulation_kwargs
    accelerator_config.gradient_accumulation_kwargs.sync_each_batch
"""
OF_LOSSES = """
    activation_offloading alpha beta center_rewards_coefficient cpo_alpha desirable_weight disable_dropout discopop_tau
    f_alpha_divergence_coef f_divergence_type label_smoothing ld_alpha lmbda loss_type loss_weights pad_to_multiple_of
    padding_value router_aux_loss_coef seq_kd simpo_gamma truncation_mode undesirable_weight use_weighting
"""
OF_SAMPLING = """
    cache_implementation chat_template_kwargs ds3_gather_for_generation generation_kwargs max_completion_length
    max_new_tokens min_p num_generations_eval repetition_penalty temperature top_k top_p
    transformers_continuous_batching_config use_transformers_continuous_batching use_transformers_paged use_vllm
    vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_importance_sampling_cap
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_correction
    vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size
    log_completions log_completions_hub_repo log_unique_prompts num_completions_to_print
"""
OF_REWARDED_LOSSES = """
    cast_lm_head_to_fp32 delta entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon
    epsilon_high importance_sampling_level mask_truncated_completions multi_objective_aggregation normalize_advantages
    off_policy_mask_threshold reward_clip_range sapo_temperature_neg sapo_temperature_pos scale_rewards
    top_entropy_quantile use_adaptive_entropy use_bias_correction_kl vespo_k_neg vespo_k_pos vespo_lambda_neg
    vespo_lambda_pos
"""
PASSED_ON = frozenset(f"{OF_TRAINER} {OF_LOSSES} {OF_SAMPLING} {OF_REWARDED_LOSSES}".split())

# --- 2: our code does what Hugging Face documents ---

OF_OURS = """
    activation_checkpointing activation_checkpointing_kwargs average_tokens_across_devices dataloader_num_workers
    dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_broadcast_buffers
    ddp_find_unused_parameters ddp_timeout deepspeed fsdp fsdp_config gradient_accumulation_steps
    gradient_checkpointing gradient_checkpointing_kwargs max_grad_norm parallelism_config per_device_eval_batch_size
    per_device_train_batch_size project torch_compile torch_compile_backend torch_compile_mode use_cpu use_liger_kernel
    generation_batch_size num_generations num_iterations steps_per_generation
    teacher_model_name_or_path teacher_model_revision
    gamma lam least_deviation value_clip value_coefficient value_speed whiten_advantages half_life rho_max rho_min
"""
OURS = frozenset(OF_OURS.split())

# --- 3: refused, because the recipe has a key for it ---

MOVED = recipe_keys(
    {
        "optimizer.learning_rate": "learning_rate lr",
        "optimizer.weight_decay": "weight_decay",
        "optimizer.betas": "adam_beta1 adam_beta2",
        "optimizer.eps": "adam_epsilon",
        "optimizer.name": "optim adafactor",
        "optimizer": "optim_args optim_target_modules",
        "schedule.name": "lr_scheduler_type",
        "schedule": "lr_scheduler_kwargs",
        "schedule.warmup_tokens": "warmup_steps",
        "schedule.warmup_share": "warmup_ratio",
        "budget.tokens": "max_steps",
        "budget.epochs": "num_train_epochs",
        "seed": "seed data_seed",
        "output_dir": "output_dir",
        "name": "run_name",
        "monitoring.trackers": "report_to",
        "checkpoints.every_tokens": "save_strategy",
        "checkpoints.every_steps": "save_steps",
        "checkpoints.keep": "save_total_limit",
        "evaluation.every_tokens": (
            "eval_strategy evaluation_strategy eval_delay eval_on_start do_eval"
        ),
        "evaluation.every_steps": "eval_steps",
        "stage": "do_train do_predict",
        "data.sequence_length": "max_length max_seq_length block_size",
        "data.packing": "packing eval_packing packing_strategy",
        "model.attention": "attn_implementation",
        "model.dtype": "torch_dtype",
        "model.path": "model_name_or_path",
        "training.per_device_train_batch_size": "batch_size per_gpu_train_batch_size",
        "training.per_device_eval_batch_size": "per_gpu_eval_batch_size",
        "training.max_grad_norm": "gradient_clipping",
        "training.use_cpu": "no_cuda",
        "training.gradient_accumulation_steps": (
            "accelerator_config.gradient_accumulation_kwargs.num_steps"
        ),
    }
)
"""Hugging Face's key -> its key in a recipe."""
MOVED_OF_TRL = recipe_keys(
    {"model.trust_remote_code": "trust_remote_code", "rewards[0].weight": "reward_weights"}
)
"""The same for keys of TRL's configs, in built-in stages."""

# --- 4: refused, because it would have no effect ---

OWN_LOADER = "each process reads its own rows of equal batches, the same rows after a resume"
PUSHES = (
    "push_to_hub hub_always_push hub_model_id hub_revision hub_strategy hub_token push_to_hub_model_id"
    " push_to_hub_organization push_to_hub_token"
)
NO_EFFECT = by_word(
    {
        "it is always off: it would log a diverged run as loss 0": "logging_nan_inf_filter",
        "the seed fixes the order of rows, so that a run resumes exactly": (
            "train_sampling_strategy group_by_length length_column_name dataloader_in_order"
        ),
        "the loader starts its worker processes as torch does": "dataloader_multiprocessing_context",
        "a resumed run starts at the checkpoint's row": "ignore_data_skip",
        "all steps have the same number of rows": "dataloader_drop_last",
        OWN_LOADER: (
            "split_batches dispatch_batches accelerator_config.split_batches"
            " accelerator_config.dispatch_batches accelerator_config.even_batches"
            " accelerator_config.use_seedable_sampler"
        ),
        "batches are always copied to the GPU without waiting for it": (
            "accelerator_config.non_blocking"
        ),
        "cpt's launcher and `training` configure accelerate": (
            "accelerator_config.use_configured_state"
        ),
        "the learning rate follows the recipe's `schedule`, step by step": (
            "accelerator_config.gradient_accumulation_kwargs.adjust_scheduler"
            " accelerator_config.gradient_accumulation_kwargs.sync_with_dataloader"
        ),
        "rows only have the columns that the stage needs": "remove_unused_columns label_names",
        "it is always off in training: with a cache, packed documents attend to each other": (
            "use_cache past_index"
        ),
        "a batch size that changes during the run would change the rows of each step": (
            "auto_find_batch_size"
        ),
        "it is always off: under DeepSpeed it saves a checkpoint that trains a batch twice": (
            "enable_jit_checkpoint"
        ),
        "the run's last weights are exported; `evaluation.stop` and `checkpoints.keep` keep the best checkpoint": (
            "load_best_model_at_end metric_for_best_model greater_is_better"
        ),
        "checkpoints are complete, so that a run can resume from each": "save_only_model",
        "checkpoints are saved once for all nodes": "save_on_each_node",
        "weights are always saved as safetensors": "save_safetensors",
        "a run resumes automatically from its newest intact checkpoint": "resume_from_checkpoint",
        "a finished run is never overwritten: use another `name`, or --new": "overwrite_output_dir",
        "a resumed run always restores the states of its callbacks": (
            "restore_callback_states_from_checkpoint"
        ),
        "trackers log to the run's folder": "logging_dir",
        "cpt shows its own progress": "disable_tqdm",
        "tokens per second are always logged": "include_tokens_per_second",
        "the launcher sets it": "local_rank",
        "processes are connected by NCCL on GPUs and gloo on CPUs": "ddp_backend",
        "a run's folder holds more than a model. Push its export by `cpt export RUN --push-to-hub ID`; for checkpoints"
        " there is `checkpoints.archive`": PUSHES,
        "held-out sets are evaluated by cpt, in loss, perplexity and bits per byte": (
            "prediction_loss_only include_for_metrics include_inputs_for_metrics batch_eval_metrics"
            " eval_do_concat_batches eval_use_gather_object eval_accumulation_steps compute_metrics"
        ),
        "held-out sets are evaluated by cpt, in the precision of the training": (
            "bf16_full_eval fp16_full_eval jit_mode_eval use_ipex"
        ),
    }
)
"""Keys without effect, and the reason; also those of older versions."""
NO_EFFECT_OF_TRL = by_word(
    {
        "stage `sft` always trains on the assistant's messages only": "assistant_only_loss",
        "stage `sft` always trains on the completion only": "completion_only_loss",
        "`data.packing` already avoids padding": "padding_free",
        "`data.sources[].text_column` and `chat` name the columns": "dataset_text_field",
        "cpt tokenizes the data in its own worker processes": "dataset_kwargs dataset_num_proc",
        "the template of `tokenizer.path` is used": "chat_template_path",
        "the tokenizer defines it": "eos_token pad_token",
        "the seed fixes the order of rows, so that a run resumes exactly": "shuffle_dataset",
        "the `model` section configures the loading": "model_init_kwargs",
        "the teacher is loaded as the model is": "teacher_model_init_kwargs",
        "the reference's log probabilities are computed during training, for each batch": (
            "precompute_ref_log_probs precompute_ref_batch_size"
        ),
        "the reference is always the model that the run started from": (
            "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"
        ),
        "`evaluation.prompts` samples before and after the run": "generate_during_eval",
        "models are decoders": "is_encoder_decoder",
        "models read text only": "log_multimodal",
        "completions call no tools": "max_tool_calling_iterations",
    }
)
"""Keys of TRL's configs without effect in built-in stages; custom stages may use them."""


def of_stages(stages: str, table: Mapping[str, str]) -> dict[tuple[str, str], str]:
    reasons: dict[tuple[str, str], str] = {}
    for stage in stages.split():
        for key, reason in by_word(table).items():
            reasons[stage, key] = reason
    return reasons


WITHOUT_TRL = "pretrain cpt sft distill distill_text"
PAIRS = "orpo cpo"
WITH_TRL = " ".join(STAGE_CONFIGS.keys() - set(WITHOUT_TRL.split()))
NO_EFFECT_IN_STAGE: Mapping[tuple[str, str], str] = {
    **of_stages(
        WITHOUT_TRL,
        {
            "TRL's trainers have it, which this stage does not use. `training.gradient_checkpointing` saves memory": (
                "activation_offloading"
            ),
            "the stage has one loss": "loss_type",
            "the model's config has it": "router_aux_loss_coef",
            "what is longer than `data.sequence_length` is cut at its end": "truncation_mode",
            "rows have one length": "pad_to_multiple_of",
        },
    ),
    **of_stages(
        WITH_TRL, {"the stage computes its loss without it": "use_liger_kernel liger_kernel_config"}
    ),
    **of_stages(
        PAIRS,
        {"`data.sequence_length` limits prompt and completion together": "max_completion_length"},
    ),
    **of_stages(
        "gkd",
        {
            "the loss is the divergence from the teacher": "loss_type router_aux_loss_coef",
            "what is longer than `data.sequence_length` is cut at its end": "truncation_mode",
            "batches are as long as their longest conversation": "pad_to_multiple_of",
        },
    ),
    **of_stages(
        "ppo spo",
        {"advantages are not compared within groups": "scale_rewards multi_objective_aggregation"},
    ),
}
"""Stage and key -> the reason, for keys that other stages use."""

NESTED = ("accelerator_config", "accelerator_config.gradient_accumulation_kwargs")
"""Sections whose keys the table has one by one."""
NO_EFFECT_OF_VALUE = {
    (
        "logging_strategy",
        "epoch",
    ): "a run is one epoch of the Trainer. Write `training.logging_steps`"
}
"""Key and value -> the reason."""
