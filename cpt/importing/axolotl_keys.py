"""Every key of an axolotl config, and what becomes of it."""

from cpt.importing.reasons import as_they_are, by_key

HANDLED: dict[str, str] = {
    "base_model": "model.path",
    "revision_of_model": "model.revision",
    "model_revision": "model.revision",
    "tokenizer_config": "tokenizer.path",
    "trust_remote_code": "model.trust_remote_code, pinned to a commit",
    "random_init_weights": "model.from_scratch",
    "reinit_weights": "model.from_scratch",
    "overrides_of_model_config": "model.rope, for rope_theta and rope_scaling",
    "model_config": "model.rope, for rope_theta and rope_scaling",
    "resize_token_embeddings_to_32x": "model.resize_embeddings",
    "attn_implementation": "model.attention",
    "flash_attention": "model.attention: auto",
    "sdp_attention": "model.attention: sdpa",
    "eager_attention": "model.attention: eager",
    "flex_attention": "model.attention: flex_attention",
    "bf16": "training.bf16",
    "fp16": "training.fp16",
    "tf32": "training.tf32",
    "bfloat16": "model.dtype",
    "float16": "model.dtype",
    "float32": "model.dtype",
    "adapter": "model.lora, or full training without it",
    "load_in_4bit": "model.lora.quantize",
    "bnb_config_kwargs": "model.lora.quantize and .double_quantize",
    "lora_r": "model.lora.r",
    "lora_alpha": "model.lora.lora_alpha",
    "lora_dropout": "model.lora.lora_dropout",
    "lora_target_linear": "model.lora.target_modules: all-linear",
    "lora_target_modules": "model.lora.target_modules",
    "lora_target_parameters": "model.lora.target_parameters",
    "lora_modules_to_save": "model.lora.modules_to_save",
    "lora_fan_in_fan_out": "model.lora.fan_in_fan_out",
    "lora_rank_pattern": "model.lora.rank_pattern",
    "lora_alpha_pattern": "model.lora.alpha_pattern",
    "peft_use_dora": "model.lora.use_dora",
    "peft_use_rslora": "model.lora.use_rslora",
    "peft_layers_to_transform": "model.lora.layers_to_transform",
    "peft_layers_pattern": "model.lora.layers_pattern",
    "peft_init_lora_weights": "model.lora.init_lora_weights",
    "datasets": "data.sources",
    "pretraining_dataset": "data.sources",
    "test_datasets": "evaluation.perplexity",
    "val_set_size": "evaluation.held_out_share",
    "streaming": "data.sources[].streaming, for datasets on the Hub",
    "sequence_len": "data.sequence_length",
    "sample_packing": "data.packing: best_fit, or none",
    "dataset_exact_deduplication": "data.deduplicate: exact",
    "rl": "stage, and training.loss_type",
    "reward_model": "stage: reward",
    "train_on_inputs": "stage: sft learns answers; cpt learns all of a conversation",
    "trl": "training, and rewards",
    "micro_batch_size": "training.per_device_train_batch_size",
    "batch_size": "training.gradient_accumulation_steps",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "num_epochs": "budget.epochs",
    "max_steps": "budget.tokens",
    "optimizer": "optimizer.name",
    "learning_rate": "optimizer.learning_rate",
    "embedding_lr": "optimizer.embedding_learning_rate",
    "embedding_lr_scale": "optimizer.embedding_learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "lr_scheduler": "schedule.name",
    "lr_scheduler_kwargs": "options of schedule",
    "cosine_min_lr_ratio": "schedule.floor",
    "warmup_steps": "schedule.warmup_tokens",
    "warmup_ratio": "schedule.warmup_share",
    "gradient_checkpointing": "training.gradient_checkpointing",
    "gradient_checkpointing_kwargs": "training.gradient_checkpointing_kwargs",
    "activation_offloading": "training.gradient_checkpointing_kwargs.offload",
    "deepspeed": "training.deepspeed",
    "fsdp": "training.fsdp",
    "fsdp_config": "training.fsdp_config",
    "fsdp_version": "training.fsdp_config.version",
    "fsdp_final_state_dict_type": "nothing: the export is a whole model",
    "sequence_parallel_degree": "training.parallelism_config.sp_size",
    "context_parallel_size": "training.parallelism_config.sp_size",
    "tensor_parallel_size": "training.parallelism_config.tp_size",
    "dp_replicate_size": "training.parallelism_config.dp_replicate_size",
    "dp_shard_size": "training.parallelism_config.dp_shard_size",
    "plugins": "what a plugin is for is said by its keys",
    **{
        f"liger_{kernel}": "training.use_liger_kernel and .liger_kernel_config"
        for kernel in ("rope", "rms_norm", "swiglu", "glu_activation", "cross_entropy", "fused_linear_cross_entropy")
    },
    "save_steps": "checkpoints.every_steps",
    "saves_per_epoch": "checkpoints.every_tokens",
    "save_strategy": "checkpoints",
    "save_total_limit": "checkpoints.keep",
    "eval_steps": "evaluation.every_steps",
    "evals_per_epoch": "evaluation.every_tokens",
    "eval_strategy": "evaluation",
    "evaluation_strategy": "evaluation",
    "output_dir": "output_dir and name",
    "seed": "seed",
    **{
        f"use_{name}": "monitoring.trackers"
        for name in ("wandb", "tensorboard", "mlflow", "comet", "trackio", "swanlab")
    },
    "wandb_project": "monitoring.trackers and .project",
    "wandb_name": "name",
    "mlflow_run_name": "name",
    "comet_project_name": "monitoring.trackers and .project",
    "trackio_project_name": "monitoring.trackers and .project",
    "trackio_run_name": "name",
    "swanlab_project": "monitoring.trackers and .project",
    "swanlab_experiment_name": "name",
    "profiler_steps": "monitoring.profile",
    "profiler_steps_start": "monitoring.profile",
    "special_tokens": "the tokenizer's; a pad token is not needed",
    "chat_template": "the tokenizer's own",
}
"""Key -> where it stands in the recipe."""

PASSED: dict[str, str] = {
    **as_they_are(
        "ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters local_rank accelerator_config"
        " dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last"
        " remove_unused_columns max_grad_norm logging_steps neftune_noise_alpha group_by_length auto_find_batch_size"
        " torch_compile torch_compile_backend torch_compile_mode load_best_model_at_end metric_for_best_model"
        " greater_is_better save_only_model save_safetensors resume_from_checkpoint include_tokens_per_second"
        " cpo_alpha simpo_gamma center_rewards_coefficient include_num_input_tokens_seen torch_empty_cache_steps"
        " trackio_space_id precompute_ref_log_probs"
    ),
    "dpo_loss_type": "loss_type",
    "dpo_loss_weights": "loss_weights",
    "eval_batch_size": "per_device_eval_batch_size",
    "noisy_embedding_alpha": "neftune_noise_alpha",
    "rl_beta": "beta",
    "dpo_beta": "beta",
    "orpo_alpha": "beta",
    "dpo_label_smoothing": "label_smoothing",
    "dpo_use_weighting": "use_weighting",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
}
"""Key -> Hugging Face's name of it, under `training:`."""

IDLE = by_key(
    {
        "the class follows from the model's config": "model_type tokenizer_type cls_model_config type_of_model",
        "done by itself": (
            "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model"
            " low_cpu_mem_usage lora_on_cpu qlora_sharded_model_loading experimental_skip_move_to_device"
            " embeddings_skip_upcast peft_autocast_adapter_dtype mean_resizing_embeddings gc_steps gc_collect_steps"
            " torchdistx_path"
        ),
        "as the tokenizer's own files say": "tokenizer_use_fast tokenizer_legacy tokenizer_save_jinja_files",
        "every key is checked": "strict axolotl_config_path is_preprocess preprocess_iterable debug telemetry",
        "tokens are kept by what they are made of, and found again": (
            "dataset_prepared_path skip_prepare_dataset dataset_keep_in_memory num_dataset_shards_to_save"
        ),
        "as many processes as the machine has cores": (
            "dataset_processes dataset_num_proc sample_packing_mp_start_method"
        ),
        "rows are laid out by `data.packing`": (
            "pad_to_sequence_len eval_sample_packing sample_packing_group_size sample_packing_bin_size"
            " batch_flattening multipack_real_batches sample_packing_eff_est pretrain_multipack_attn"
            " streaming_multipack_buffer_size pretrain_multipack_buffer_size pretraining_sample_concatenation"
            " dpo_padding_free pad_to_multiple_of"
        ),
        "`cpt mixture` counts them": "total_num_tokens total_supervised_tokens",
        "the launcher says what runs where": "device device_map world_size ddp max_memory gpu_memory_limit",
        "`safety.loss_guard` skips such steps and goes back": "loss_watchdog_threshold loss_watchdog_patience",
        "as `hf auth login` has it": "hf_use_auth_token",
        "a run goes on by itself from its newest checkpoint": "auto_resume_from_checkpoints",
        "tokens per second are always logged": "include_tkps logging_first_step",
        "the export is the merged model": "merge_lora merge_method",
        "an example that is too long loses its end; a prompt that is, is left out": (
            "excess_length_strategy max_prompt_len"
        ),
        "documents are always shuffled; `order_by` gives an order": (
            "shuffle_merged_datasets shuffle_before_merging_datasets"
        ),
        "as long as the rows of training": "eval_sequence_len",
        "the loss is chunked by itself": (
            "chunked_cross_entropy chunked_cross_entropy_num_chunks flash_attn_cross_entropy"
        ),
        "the loss is chunked by itself; `training.use_liger_kernel` is a kernel for it": "cut_cross_entropy",
        "models of text alone are trained here": "freeze_mm_modules",
    }
)
"""Key -> why nothing has to be said."""

NOT = by_key(
    {
        "a kernel that there is not here; it changes the speed, not what is learned": (
            "lora_mlp_kernel lora_qkv_kernel lora_o_kernel flash_attn_fuse_mlp flash_attn_fuse_qkv flash_attn_rms_norm"
            " flash_optimum use_kernels experts_implementation flex_attn_compile_kwargs unsloth_cross_entropy_loss"
            " unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope tiled_mlp"
            " tiled_mlp_num_shards tiled_mlp_use_original_mlp llama4_linearized_experts deepcompile"
            " dpo_use_liger_kernel liger_layer_norm liger_rms_norm_gated liger_kernel_impl lora_embedding_kernel"
            " fused_attn_kernel gemma4_hybrid_attn_impl large_head_attention flash_attn_d512 sdpa_varlen"
            " torch_compile_options use_scattermoe use_sonicmoe expert_backend moe_grouped_backend"
            " moe_dequant_chunk_size moe_bnb_fast use_dsv4_kernels use_glm_dsa_kernels dsv4_fp8_lora_kernel"
            " dsv4_shared_mlp_lora_kernel dsv4_fp4_grouped_mode dsv4_bf16_all"
        ),
        "`model.attention: auto` takes the fastest that is right": "xformers_attention s2_attention sage_attention",
        "attention is computed as the model's code has it": (
            "scaling_softmax scaling_softmax_factor scaling_softmax_bias"
        ),
        "rows are divided by DeepSpeed Ulysses, without a ring": "heads_k_stride ring_attn_func",
        "tokens are added beforehand, by `cpt tokenizer extend`; then `model.resize_embeddings: true`": (
            "tokens added_tokens_overrides"
        ),
        "rows of a vocabulary are never taken away": "shrink_embeddings",
        "new rows begin at the mean where `cpt tokenizer extend` adds them": "fix_untrained_tokens",
        "weights in 8 bit are not trained: `model.lora.quantize: nf4` takes 4 bit, without it bfloat16": (
            "load_in_8bit"
        ),
        "weights that are quantised already are not trained; take the base itself, and `model.lora.quantize: nf4`": (
            "gptq gptq_disable_exllama model_quantization_config model_quantization_config_kwargs peft torchao"
            " use_onebitllms nvfp4_merge_aware nvfp4_merge_aware_start_step"
        ),
        "nothing is quantised while it is trained; `cpt export` writes the model": "qat quantization",
        "training is in bf16 or fp16": "fp8 fp8_config fp8_enable_fsdp_float8_all_gather",
        "of the base, linear layers alone are kept in 4 bit, and nothing in fp8": (
            "quantize_moe_experts nonexpert_quantization gemma4_fp8_nonexpert gemma4_nf4_nonexpert"
            " dsv4_fp8_nonexpert_mode"
        ),
        "weights are fp32 where nothing else keeps them, norms too": "fp32_norms fp32_norm_classes",
        "no such adapter can be trained here; docs/adapters.md names those that can": (
            "relora relora_prune_ratio relora_prune_method relora_cpu_offload relora_steps relora_warmup_steps "
            "relora_anneal_steps jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps mora "
            "lisa_n_layers lisa_step_interval lisa_layers_attribute loftq_config peft_layer_replication "
            "peft_trainable_token_indices peft_ensure_weight_tying"
        ),
        "one learning rate for both halves of an adapter": "loraplus_lr_ratio loraplus_lr_embedding",
        "an adapter is not gone on with: merge it into its base (`cpt merge`) and name the result as `model.path`": (
            "lora_model_dir"
        ),
        "all parameters learn, or adapters, or `model.train_only: new_rows`": (
            "unfrozen_parameters spectrum_top_fraction spectrum_model_name"
        ),
        "the model's own config counts; another shape: `model.config`": "base_model_config",
        "what `from_pretrained` takes besides is set by cpt": "overrides_of_model_kwargs model_kwargs",
        "only the weights that the model's config names are fetched": "base_model_ignore_patterns",
        "a tokenizer has a tokenizer.json here": "tokenizer_use_mistral_common",
        "a part of all datasets cannot be named": "dataset_shard_num dataset_shard_idx",
        "tokens are not pushed": "push_dataset_to_hub",
        "`data.filters: [{name: length, min_characters: ...}]` drops short documents": "min_sample_len",
        "documents are put where they fit best": "sample_packing_sequentially",
        "`data.sources[].order_by` reads a source by a score": "curriculum_sampling",
        "see docs/long_context.md: `model.rope`": (
            "use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks"
        ),
        "rewards for each step are not learned": "process_reward_model",
        "`model.rope` changes the positions": "rope_scaling",
        "axolotl has it no more: rows are `sequence_len` long": "max_packed_sequence_len",
        "experts are not divided over GPUs": (
            "expert_parallel_size expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes"
            " expert_parallel_token_capacity expert_parallel_fallback_on_unsupported dense_mixer"
        ),
        "a Trainer of your own is a stage of your own: docs/stages.md": "trainer_cls ebft",
        "stage `distill` learns from a teacher: docs/stages.md": (
            "kd_trainer kd_ce_alpha kd_alpha kd_temperature kd_temperature_min kd_beta kd_normalize_topk"
            " kd_online_server kd_online_server_base_url kd_online_topk kd_online_timeout"
        ),
        "another service trains there": "hatchery",
        "rewards are functions of your own: `rewards: [module:function]`": (
            "nemo_gym_enabled nemo_gym_dir nemo_gym_auto_clone nemo_gym_config_paths nemo_gym_head_port"
            " nemo_gym_server_timeout nemo_gym_verify_timeout nemo_gym_run_timeout nemo_gym_datasets"
            " nemo_gym_auto_start nemo_gym_model_name nemo_gym_multi_turn nemo_gym_max_turns"
        ),
        "nothing is pruned while it is trained": "llmcompressor",
        "a reward model has one output": "num_labels",
        "`training.use_vllm` and its keys are GRPOConfig's": "vllm",
        "TRL has it no more": "rpo_alpha dpo_norm_loss dpo_use_logits_to_keep dpo_generate_during_eval",
        "the loss is cross entropy; a loss of your own is a stage of your own": (
            "use_eaft eaft_alpha eaft_k liger_use_token_scaling"
        ),
        "language models are trained from left to right here": (
            "diffusion noise_schedule min_mask_ratio max_mask_ratio"
        ),
        "write the optimizer's options beside its name: `optimizer: {name: ..., OPTION: VALUE}`": (
            "optim_args dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_rank"
            " qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant qgalore_proj_bits"
            " qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size grokfast_alpha"
            " grokfast_lamb"
        ),
        "every parameter that learns is the optimizer's": "optim_target_modules",
        "one rate; `embedding_learning_rate` and `layer_decay` beside it": "lr_groups lr_div_factor",
        "a schedule of your own: `schedule: {name: package.module:function}`": (
            "lr_quadratic_warmup cosine_constant_lr_ratio"
        ),
        "AdamW has no third moment": "adam_epsilon2 adam_beta3",
        "`training.gradient_checkpointing_kwargs: {selective: true}` keeps the outputs of attention": (
            "selective_checkpointing"
        ),
        "layers move to the host by a DeepSpeed profile with offload: `training.deepspeed`": (
            "layer_offloading ple_cpu_offload"
        ),
        "a run ends with its budget; `evaluation.retain` stops one that forgets": "early_stopping_patience",
        "a checkpoint is not written at the first step": "save_first_step",
        "SIGUSR1 to the run saves and stops; the same command goes on": "dynamic_checkpoint",
        "there is no such tracker here": "use_otel_metrics otel_metrics_host otel_metrics_port",
        "`evaluation.prompts` are gone on with before and after": (
            "eval_table_size eval_max_new_tokens generate_samples num_generation_samples generation_max_new_tokens "
            "generation_temperature generation_top_p generation_top_k generation_prompt_ratio generation_do_sample"
        ),
        "name `evaluation.tasks`": (
            "do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split lm_eval_tasks"
            " lm_eval_batch_size lm_eval_post_train lm_eval_model"
        ),
        "save it as the tokenizer's own (chat_template.jinja in its folder), and set `tokenizer.path`": (
            "chat_template_jinja"
        ),
        "the tokenizer's template is written without further values": "chat_template_kwargs",
        "the token that ends a turn is told by the template": "eot_tokens",
        "write it into the tokenizer's chat template, or into the files": "default_system_message",
        "nothing is pushed while a run goes on: `hf upload NAME RUN/final` afterwards": (
            "hub_model_id hub_strategy hub_revision"
        ),
        "set it in the environment: COMET_START_ONLINE": "comet_online",
        "the tracker's own environment variables": "comet_experiment_config",
        "`cpt chat --browser`": (
            "gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature"
        ),
        "`cpt search` runs on Ray; a run is launched as usual": (
            "use_ray ray_run_name ray_num_workers resources_per_worker"
        ),
        "models of text alone are trained here": (
            "image_size image_resize_algorithm processor_type processor_kwargs role_boundaries"
        ),
        "set it in the environment, as SwanLab reads it": (
            "swanlab_description swanlab_mode swanlab_workspace swanlab_api_key swanlab_log_model swanlab_web_host "
            "swanlab_api_host swanlab_lark_webhook_url swanlab_lark_secret swanlab_log_completions "
            "swanlab_completion_log_interval swanlab_completion_max_buffer"
        ),
    }
) | {
    key: f"set it in the environment: {key.upper()}"
    for key in as_they_are(
        "wandb_entity wandb_run_id wandb_mode wandb_watch wandb_log_model mlflow_tracking_uri mlflow_experiment_name "
        "hf_mlflow_log_artifacts comet_api_key comet_workspace comet_mode comet_experiment_key"
    )
}
"""Key -> why not, and what to do."""
KNOWN = HANDLED.keys() | PASSED.keys() | IDLE.keys() | NOT.keys()
