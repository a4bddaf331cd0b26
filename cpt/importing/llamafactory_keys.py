"""Every key of a LLaMA-Factory config that is its own, and what becomes of it; it takes those of Hugging Face's
Trainer besides."""

from cpt.importing.reasons import as_they_are, by_key

HANDLED: dict[str, str] = {
    "model_name_or_path": "model.path",
    "model_revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code, pinned to a commit",
    "train_from_scratch": "model.from_scratch",
    "resize_vocab": "model.resize_embeddings",
    "rope_scaling": "model.rope",
    "flash_attn": "model.attention",
    "bf16": "training.bf16",
    "fp16": "training.fp16",
    "tf32": "training.tf32",
    "pure_bf16": "model.dtype",
    "stage": "stage",
    "finetuning_type": "model.lora, or full training",
    "lora_rank": "model.lora.r",
    "lora_alpha": "model.lora.lora_alpha",
    "lora_dropout": "model.lora.lora_dropout",
    "lora_target": "model.lora.target_modules",
    "additional_target": "model.lora.modules_to_save",
    "use_rslora": "model.lora.use_rslora",
    "use_dora": "model.lora.use_dora",
    "pissa_init": "model.lora.init_lora_weights: pissa",
    "pissa_iter": "model.lora.init_lora_weights: pissa_niter_N",
    "oft_rank": "model.lora.r, with method: oft",
    "oft_block_size": "model.lora.oft_block_size, with method: oft",
    "oft_target": "model.lora.target_modules, with method: oft",
    "module_dropout": "model.lora.module_dropout, with method: oft",
    "quantization_bit": "model.lora.quantize, for 4",
    "quantization_type": "model.lora.quantize",
    "double_quantization": "model.lora.double_quantize",
    "quantization_method": "model.lora.quantize, for bitsandbytes",
    "dataset": "data.sources",
    "dataset_dir": "paths of data.sources",
    "eval_dataset": "evaluation.perplexity",
    "val_size": "evaluation.held_out_share",
    "max_samples": "data.sources[].max_documents",
    "mix_strategy": "data.temperature, or weights",
    "interleave_probs": "data.sources[].weight",
    "streaming": "data.sources[].streaming, for datasets on the Hub",
    "cutoff_len": "data.sequence_length",
    "packing": "data.packing",
    "neat_packing": "data.packing: best_fit",
    "train_on_prompt": "stage: sft learns answers; cpt learns all of a conversation",
    "template": "the tokenizer's own",
    "per_device_train_batch_size": "training.per_device_train_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "num_train_epochs": "budget.epochs",
    "max_steps": "budget.tokens",
    "optim": "optimizer.name",
    "use_muon": "optimizer.name: muon",
    "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "lr_scheduler_type": "schedule.name",
    "lr_scheduler_kwargs": "options of schedule",
    "warmup_steps": "schedule.warmup_tokens",
    "warmup_ratio": "schedule.warmup_share",
    "gradient_checkpointing": "training.gradient_checkpointing",
    "disable_gradient_checkpointing": "training.gradient_checkpointing: false",
    "gradient_checkpointing_kwargs": "training.gradient_checkpointing_kwargs",
    "use_unsloth_gc": "training.gradient_checkpointing_kwargs.offload",
    "use_reentrant_gc": "training.gradient_checkpointing_kwargs.use_reentrant",
    "enable_liger_kernel": "training.use_liger_kernel",
    "use_liger_kernel": "training.use_liger_kernel",
    "pref_loss": "stage, and training.loss_type",
    "pref_beta": "training.beta",
    "reward_model": "rewards: reward_model",
    "deepspeed": "training.deepspeed",
    "fsdp": "training.fsdp",
    "fsdp_config": "training.fsdp_config",
    "cp_size": "training.parallelism_config.sp_size",
    "save_steps": "checkpoints.every_steps",
    "save_strategy": "checkpoints",
    "save_total_limit": "checkpoints.keep",
    "eval_steps": "evaluation.every_steps",
    "eval_strategy": "evaluation",
    "evaluation_strategy": "evaluation",
    "output_dir": "output_dir and name",
    "run_name": "name",
    "seed": "seed",
    "report_to": "monitoring.trackers",
    "use_swanlab": "monitoring.trackers",
    "swanlab_project": "monitoring.trackers and .project",
    "swanlab_run_name": "name",
    "do_train": "cpt train",
}
"""Key -> where it stands in the recipe."""

PASSED: dict[str, str] = {
    **as_they_are("simpo_gamma ld_alpha"),
    "dpo_label_smoothing": "label_smoothing",
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
}
"""Key -> Hugging Face's name of it, under `training:`."""

IDLE = by_key(
    {
        "tokens are kept by what they are made of, and found again": (
            "overwrite_cache tokenized_path data_shared_file_system cache_dir"
        ),
        "as many processes as the machine has cores": "preprocessing_num_workers preprocessing_batch_size",
        "curves are always kept: `cpt report`, `cpt runs`": (
            "plot_loss compute_accuracy print_param_status include_effective_tokens_per_second"
            " include_num_input_tokens_seen include_tokens_per_second"
        ),
        "a run is never overwritten: a new name is a new run": "overwrite_output_dir",
        "documents are shuffled by their place, without a buffer": "buffer_size",
        "done by itself": (
            "ignore_pad_token_for_loss low_cpu_mem_usage offload_folder quantization_device_map use_fast_tokenizer "
            "block_diag_attn model_max_length compute_dtype device_map"
        ),
        "the loss is computed in fp32; weights are fp32 where nothing else keeps them": (
            "upcast_layernorm upcast_lmhead_output"
        ),
        "each held-out set is evaluated by itself": "eval_on_each_dataset",
        "models of text alone are trained here": (
            "freeze_vision_tower freeze_multi_modal_projector freeze_language_model"
        ),
        "as `hf auth login` has it": "hf_hub_token",
        "as the tokenizer's chat template writes it": "enable_thinking preserve_thinking tool_format",
        "the export is the merged model": "pissa_convert",
        "of inference: `cpt serve`, `cpt chat`": "use_cache use_kv_cache infer_dtype infer_backend",
        "an adapter is always a new one": "create_new_adapter",
        "of inference: `cpt chat`": (
            "do_sample temperature top_p top_k num_beams max_new_tokens max_length repetition_penalty length_penalty"
            " skip_special_tokens"
        ),
    }
)
"""Key -> why nothing has to be said."""

NOT = by_key(
    {
        "some layers alone cannot be trained: all parameters, adapters, or `model.train_only: new_rows`": (
            "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules use_llama_pro"
        ),
        "there is no such optimizer here, and adamw stands in its place; docs/optimizers.md names those that save memory": (  # noqa: E501
            "galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise"
            " apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type"
            " apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block badam_switch_mode"
            " badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose use_galore use_apollo use_badam"
            " use_adam_mini"
        ),
        "PPO here is TRL's GRPO with a value head: docs/stages.md names its keys of `training:`": (
            "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards"
        ),
        "a reward model is a whole model here: what stage `reward` exported": (
            "reward_model_adapters reward_model_quantization_bit reward_model_type"
        ),
        "the reference is the model that the run starts from": "ref_model_adapters ref_model_quantization_bit",
        "the reference is the model that the run starts from; name it as `model.path`": "ref_model",
        "`cpt export` writes the model": (
            "export_dir export_size export_device export_quantization_bit export_quantization_dataset "
            "export_quantization_nsamples export_quantization_maxlen export_legacy_format"
        ),
        "`hf upload NAME RUN/final` when the run has ended": "export_hub_model_id",
        "of inference: `cpt serve`": (
            "vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen"
            " sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend kt_optimize_rule kt_maxlen"
            " kt_use_cuda_graph kt_mode kt_force_think cpu_infer chunk_size"
        ),
        "the Trainer of Hugging Face runs it here": (
            "use_kt use_mca use_hyper_parallel hyper_parallel_args use_megatron_bridge use_v1_kernels use_kernels"
            " kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num"
            " kt_lora_expert_intermediate_size"
        ),
        "of Megatron; GPUs share a model by DeepSpeed, FSDP2 or `training.parallelism_config` here: docs/splitting.md": (  # noqa: E501
            "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size"
            " expert_model_parallel_size sequence_parallel bias_activation_fusion apply_rope_fusion"
            " use_distributed_optimizer overlap_param_gather overlap_grad_reduce moe_grouped_gemm"
            " moe_token_dispatcher_type recompute_granularity"
        ),
        "`monitoring.profile: {at_step: 1, steps: 3}` profiles some steps": (
            "enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps"
            " profiler_repeat profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules"
        ),
        "a kernel that there is not here; it changes the speed, not what is learned": "use_unsloth",
        "models of text alone are trained here": (
            "image_max_pixels image_min_pixels image_do_pan_and_scan image_resolution video_max_pixels"
            " video_min_pixels video_fps video_maxlen video_resolution media_dir use_audio_in_video"
            " audio_sampling_rate crop_to_patches train_mm_proj_only"
        ),
        "set it in the environment, as SwanLab reads it": (
            "swanlab_workspace swanlab_mode swanlab_api_key swanlab_logdir swanlab_lark_webhook_url"
            " swanlab_lark_secret"
        ),
        "tokens are added to a tokenizer beforehand: `cpt tokenizer extend`; then `tokenizer.path`, and `model.resize_embeddings: true`": (  # noqa: E501
            "new_special_tokens add_tokens add_special_tokens new_special_tokens_config init_special_tokens"
        ),
        "a special token in a text is always spelled out": "split_special_tokens",
        "an adapter is not gone on with: merge it into its base (`cpt merge`), and name it as `model.path`": (
            "adapter_name_or_path adapter_folder"
        ),
        "one learning rate for both halves of an adapter": "loraplus_lr_ratio loraplus_lr_embedding",
        "attention is computed as the model's code has it": "shift_attn mixture_of_depths",
        "the model's own config says it: `model.config: {router_aux_loss_coef: ...}`": "moe_aux_loss_coef",
        "every turn of the assistant is learned; leave earlier turns out of the files, or give `prompt` and `completion`": (  # noqa: E501
            "mask_history"
        ),
        "write it into the tokenizer's chat template, or into the files": "default_system",
        "the loss is cross entropy; a loss of your own is a stage of your own": (
            "use_dft_loss use_eaft_loss eaft_alpha use_asft_loss asft_alpha"
        ),
        "the chosen answers are not learned besides: `stage: orpo` does that": "pref_ftx",
        "TRL's `loss_type: [sigmoid, bco_pair]` with `loss_weights` is that": "pref_bco_weight",
        "documents are always shuffled; `data.sources[].order_by` gives an order": "disable_shuffling",
        "a run ends with its budget; `evaluation.retain` stops one that forgets": "early_stopping_steps",
        "`cpt evaluate` and `evaluation.tasks` judge a model": (
            "do_eval do_predict predict_with_generate eval_num_beams generation_max_length generation_num_beams "
            "compute_exact_match sortish_sampler generation_config"
        ),
        "training is in bf16 or fp16": "fp8 fp8_backend fp8_enable_fsdp_float8_all_gather",
        "models and datasets come from the Hub of Hugging Face, or from folders": "ms_hub_token om_hub_token",
        "`cpt search` runs on Ray; a run is launched as usual": (
            "ray_run_name ray_storage_path ray_storage_filesystem ray_num_workers ray_init_kwargs resources_per_worker"
            " placement_strategy master_addr master_port"
        ),
        "with `model.lora: {method: oft}` it is peft's own default": "oft_coft oft_eps",
        "nothing is pushed while a run goes on: `hf upload NAME RUN/final` afterwards": "push_to_hub",
        "nothing is pushed while a run goes on: `hf upload NAME RUN/final`": (
            "hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision hub_token"
        ),
    }
)
"""Key -> why not, and what to do."""
KNOWN = HANDLED.keys() | PASSED.keys() | IDLE.keys() | NOT.keys()
