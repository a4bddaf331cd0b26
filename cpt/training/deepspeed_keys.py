"""The effect of each key of a DeepSpeed profile in a run: one table of four lists, as for `training:`.

A key is passed on to DeepSpeed, has its effect by the recipe or our code, is replaced with one line in the log, or is
refused. A test walks all keys of the installed DeepSpeed.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from cpt.distributed import PIPELINE, TENSOR_PARALLEL
from cpt.recipe.training_keys import by_word

Fate = Literal["passed on", "ours", "replaced", "refused"]


def fate_of_key(key: str) -> Fate | None:
    """Return what a key, such as `bf16.enabled`, does; None for a key that is not in the table."""
    if key in REFUSED:
        return "refused"
    if key.partition(".")[0] in REPLACED:
        return "replaced"
    if key in OURS:
        return "ours"
    if key in PASSED_ON:
        return "passed on"
    return None


def refused_keys(profile: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, str]]:
    """Yield each refused key of a profile, and why; a key that has no other effect than its default is accepted."""
    for name, value in profile.items():
        key = f"{section}{name}"
        if key in REMOVED or (key in REFUSED and not is_off(key, value)):
            yield key, f"`{key}`: {REFUSED[key]}. Remove it here"
        elif key in SECTIONS and isinstance(value, Mapping):
            yield from refused_keys(value, f"{key}.")


def is_off(key: str, value: object) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled", True) is False
    return value is None or value == DEFAULTS.get(key, False)


def below(section: str, keys: str) -> str:
    return " ".join(f"{section}.{word}" for word in keys.split())


# --- 1: passed on to DeepSpeed ---

SECTIONS = {
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "bf16": "enabled immediate_grad_update check_grad_overflow",
    "fp16": """
        enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale
    """,
    "comms_logger": "enabled prof_all prof_ops verbose debug",
    "csv_monitor": "enabled output_path job_name",
    "data_types": "grad_accum_dtype buffer_dtype keep_in_fp32_modules",
    "flops_profiler": """
        enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file
    """,
    "zero_optimization": """
        stage allgather_bucket_size allgather_sequential contiguous_gradients cpu_offload_use_pin_memory
        enable_sanity_checks ignore_unused_parameters leaf_module log_trace_cache_warnings memory_efficient_linear
        offload_optimizer offload_param overlap_comm override_module_apply parameter_alignment
        pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients
        stage3_allgather_sequential stage3_max_live_parameters stage3_max_reuse_distance
        stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold
        stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size
        use_multi_rank_bucket_allreduce zero_hpz_partition_size zero_quantized_gradients
        zero_quantized_nontrainable_weights zero_quantized_weights
    """,
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.offload_optimizer": """
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio cpuadam_cores_perc
    """,
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
}
"""Sections whose keys the table has one by one."""
WHOLE = """
    communication_data_type disable_python_gc dump_state gradient_predivide_factor log_level memory_breakdown
    prescale_gradients seq_parallel_communication_data_type vocabulary_size wall_clock_breakdown
"""
PASSED_ON = frozenset(WHOLE.split()).union(
    SECTIONS, *(below(section, words).split() for section, words in SECTIONS.items())
)

# --- 2: the recipe's value is used, and the profile may repeat it; or cpt sets what runs need ---

OF_RUNS = """
    bfloat16 gradient_accumulation_steps gradient_clipping train_batch_size train_micro_batch_size_per_gpu
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
"""
OF_ZERO = """
    cpu_offload cpu_offload_param stage3_gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save gather_16bit_weights_on_model_save
"""
OURS = frozenset(f"{OF_RUNS} {below('zero_optimization', OF_ZERO)}".split())

# --- 3: replaced by the recipe's, or removed, with one line in the log ---

LEFT_OUT = ("steps_per_print", "timers")  # accelerate turns off the lines that these are about
REPLACED = ("optimizer", "scheduler", "amp", "activation_checkpointing", *LEFT_OUT)

# --- 4: refused ---

OF_OLDER = """
    compression_training curriculum_learning eigenvalue elasticity graph_harvesting nebula progressive_layer_drop
    quantize_training sparse_attention sparse_gradients zero_optimization.mics_shard_size
    zero_optimization.mics_hierarchical_params_gather zero_optimization.zeropp_loco_param
"""
REMOVED = frozenset(OF_OLDER.split())
"""DeepSpeed stops at these keys, also if they are off."""
REFUSED: Mapping[str, str] = dict.fromkeys(
    sorted(REMOVED), "DeepSpeed 0.19 has removed it"
) | by_word(
    {
        "the recipe has it, as `training.parallelism_config.sp_size`": "sequence_parallel_size",
        TENSOR_PARALLEL: "tensor_parallel",
        PIPELINE: "pipeline",
        "the recipe has it, as `budget.global_batch_tokens` on any number of GPUs": "elasticity",
        "`cpt plan` chooses settings for the recipe": "autotuning",
        "the recipe has it, as `monitoring.trackers`": "tensorboard wandb comet",
        "the recipe has it, as `training.bf16`": "torch_autocast data_types.param_dtype",
        "the recipe has it, as `training.torch_compile`": "compile",
        "the recipe has it, as `model.lora.quantize`": "weight_quantization",
        "it would have no effect: cpt loads the data, in an order that resumes exactly": (
            "curriculum_learning data_efficiency dataloader_drop_last"
        ),
        "it would have no effect: the recipe says how to save, in `checkpoints`": (
            "checkpoint nebula datastates_ckpt"
        ),
        "it would have no effect: checkpoints resume on any number of processes": (
            "zero_optimization.elastic_checkpoint"
        ),
        "it would have no effect: DeepSpeed 0.19 does not use it": (
            "disable_allgather zero_optimization.allgather_partitions"
        ),
        "it would have no effect: stages that sample generate with the trained model": "hybrid_engine",
        "expert parallelism is not supported. ZeRO-3 splits experts over all processes": (
            "expert_parallel use_data_before_expert_parallelism"
        ),
        "the gradient of a step is the mean over its tokens, on any number of processes": (
            "gradient_allreduce_op"
        ),
        "a step has a fixed number of micro-batches": "managed_gradient_accumulation",
        "a resumed run continues from the weights in fp32": (
            "zero_optimization.load_from_fp32_weights"
        ),
        "without the norm, each step would be skipped as a bad one": (
            "zero_optimization.compute_grad_norm"
        ),
        "only DeepSpeed's own optimizers have it, and the recipe's `optimizer` is used": (
            "zero_optimization.zenflow zero_optimization.offload_optimizer.super_offload"
            " zero_optimization.save_muon_momentum_buffer_in_memory fp16.fp16_master_weights_and_grads"
            " bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states"
        ),
        "DeepSpeed 0.19 has only one ZeRO-1": "zero_optimization.legacy_stage1",
    }
)
DEFAULTS = {
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "zero_optimization.allgather_partitions": True,
    "zero_optimization.compute_grad_norm": True,
    "zero_optimization.load_from_fp32_weights": True,
}
"""Values of refused keys that change nothing; false for the others."""
TOP_LEVEL = sorted(key for key in {*PASSED_ON, *OURS, *REPLACED, *REFUSED} if "." not in key)
