"""One knob in one place: the keys of Hugging Face (and habits from elsewhere) that are ours here, and where they are
written."""

from cpt.recipe.tree import Location, dotted

LEARNING_RATE = ("optimizer", "learning_rate")
BETAS = ("optimizer", "betas")
WARMUP = ("schedule", "warmup_tokens")
EVALUATION = ("evaluation", "every_tokens")
SAVING = ("checkpoints", "every_tokens")
SEQUENCE_LENGTH = ("data", "sequence_length")
PACKING = ("data", "packing")
MICRO_BATCH = ("training", "per_device_train_batch_size")

MOVED: dict[str, Location] = {
    "learning_rate": LEARNING_RATE,
    "lr": LEARNING_RATE,
    "weight_decay": ("optimizer", "weight_decay"),
    "adam_beta1": BETAS,
    "adam_beta2": BETAS,
    "adam_epsilon": ("optimizer", "eps"),
    "optim": ("optimizer", "name"),
    "optim_args": ("optimizer",),
    "optim_target_modules": ("optimizer",),
    "adafactor": ("optimizer", "name"),
    "lr_scheduler_type": ("schedule", "name"),
    "lr_scheduler_kwargs": ("schedule",),
    "warmup_steps": WARMUP,
    "warmup_ratio": ("schedule", "warmup_share"),
    "max_steps": ("budget", "tokens"),
    "num_train_epochs": ("budget", "epochs"),
    "seed": ("seed",),
    "data_seed": ("seed",),
    "output_dir": ("output_dir",),
    "run_name": ("name",),
    "overwrite_output_dir": ("name",),
    "report_to": ("monitoring", "trackers"),
    "project": ("monitoring", "project"),
    "save_strategy": SAVING,
    "save_steps": ("checkpoints", "every_steps"),
    "save_total_limit": ("checkpoints", "keep"),
    "evaluation_strategy": EVALUATION,
    "eval_strategy": EVALUATION,
    "eval_steps": ("evaluation", "every_steps"),
    "eval_delay": EVALUATION,
    "eval_on_start": EVALUATION,
    "do_eval": EVALUATION,
    "do_train": ("stage",),
    "do_predict": ("stage",),
    "max_length": SEQUENCE_LENGTH,
    "max_seq_length": SEQUENCE_LENGTH,
    "block_size": SEQUENCE_LENGTH,
    "packing": PACKING,
    "eval_packing": PACKING,
    "packing_strategy": PACKING,
    "attn_implementation": ("model", "attention"),
    "torch_dtype": ("model", "dtype"),
    "model_name_or_path": ("model", "path"),
    "batch_size": MICRO_BATCH,
    "per_gpu_train_batch_size": MICRO_BATCH,
    "per_gpu_eval_batch_size": ("training", "per_device_eval_batch_size"),
    "gradient_clipping": ("training", "max_grad_norm"),
    "no_cuda": ("training", "use_cpu"),
}
"""Key -> where the same thing is written here."""

TOKENS = ("budget", "tokens")
SOURCES = ("data", "sources")
LORA = ("model", "lora")
MODEL = ("model", "path")

OTHER_WORDS: dict[str, Location] = {
    **dict.fromkeys(
        ("base_model", "model_name", "model_id", "pretrained_model_name_or_path", "base_model_name_or_path"), MODEL
    ),
    **dict.fromkeys(
        ("tokenizer_name", "tokenizer_name_or_path", "tokenizer_path", "tokenizer_config"), ("tokenizer", "path")
    ),
    **dict.fromkeys(
        ("dataset", "datasets", "dataset_name", "dataset_path", "train_file", "train_data", "data_path", "sources"),
        SOURCES,
    ),
    **dict.fromkeys(("dataset_text_field", "text_field"), (*SOURCES, 0, "text_column")),
    **dict.fromkeys(
        ("sequence_len", "seq_length", "seq_len", "max_seq_len", "max_sequence_length", "cutoff_len"), SEQUENCE_LENGTH
    ),
    **dict.fromkeys(("context_length", "model_max_length", "max_len"), SEQUENCE_LENGTH),
    "sample_packing": PACKING,
    **dict.fromkeys(
        ("micro_batch_size", "per_device_batch_size", "train_batch_size", "train_micro_batch_size_per_gpu"),
        MICRO_BATCH,
    ),
    "eval_batch_size": ("training", "per_device_eval_batch_size"),
    **dict.fromkeys(("gradient_accumulation", "grad_accum_steps"), ("training", "gradient_accumulation_steps")),
    "global_batch_size": ("budget", "global_batch_tokens"),
    **dict.fromkeys(("num_epochs", "epoch", "n_epochs"), ("budget", "epochs")),
    **dict.fromkeys(("max_tokens", "train_tokens", "steps", "num_steps", "max_train_steps"), TOKENS),
    "peak_lr": LEARNING_RATE,
    **dict.fromkeys(("beta1", "beta2"), BETAS),
    "wd": ("optimizer", "weight_decay"),
    **dict.fromkeys(("lr_scheduler", "scheduler", "scheduler_type"), ("schedule", "name")),
    **dict.fromkeys(("warmup", "num_warmup_steps"), WARMUP),
    **dict.fromkeys(("min_lr_ratio", "cosine_min_lr_ratio"), ("schedule", "floor")),
    **dict.fromkeys(("grad_clip", "clip_grad", "clip_grad_norm", "max_norm"), ("training", "max_grad_norm")),
    **dict.fromkeys(("adapter", "peft_config", "use_lora", "lora_config", "finetuning_type"), LORA),
    **dict.fromkeys(("lora_r", "lora_rank", "rank"), (*LORA, "r")),
    **dict.fromkeys(("lora_alpha", "alpha"), (*LORA, "lora_alpha")),
    **dict.fromkeys(("lora_dropout", "dropout"), (*LORA, "lora_dropout")),
    **dict.fromkeys(
        ("lora_target", "lora_target_modules", "target_modules", "target", "targets"), (*LORA, "target_modules")
    ),
    **dict.fromkeys(("load_in_4bit", "use_4bit", "quantization_bit"), (*LORA, "quantize")),
    **dict.fromkeys(
        ("val_set_size", "validation_split", "test_size", "val_size", "eval_ratio"), ("evaluation", "held_out_share")
    ),
    **dict.fromkeys(("eval_dataset", "validation_file", "test_datasets"), ("evaluation", "perplexity")),
    **dict.fromkeys(("flash_attention", "flash_attn", "attn_impl", "use_flash_attention_2"), ("model", "attention")),
    **dict.fromkeys(("wandb_project", "project_name"), ("monitoring", "project")),
    "logger": ("monitoring", "trackers"),
    "num_workers": ("training", "dataloader_num_workers"),
    "experiment_name": ("name",),
    "task": ("stage",),
}
"""The same, for words of axolotl, LLaMA-Factory, TRL and others that are keys of nothing in Hugging Face's Trainer."""

UNITS = {
    "max_steps": "in tokens: steps x tokens of a step",
    "warmup_steps": "in tokens: steps x tokens of a step",
    "save_strategy": "or `checkpoints.every_steps`",
    "evaluation_strategy": "or `evaluation.every_steps`",
    "eval_strategy": "or `evaluation.every_steps`",
    "adam_beta1": "a list of both: [0.9, 0.95]",
    "adam_beta2": "a list of both: [0.9, 0.95]",
    "overwrite_output_dir": "a run is never overwritten; a new name is a new run",
    "global_batch_size": "in tokens: rows x data.sequence_length",
    **dict.fromkeys(("steps", "num_steps", "max_train_steps"), "in tokens: steps x tokens of a step"),
    **dict.fromkeys(("warmup", "num_warmup_steps"), "in tokens: steps x tokens of a step"),
    **dict.fromkeys(("beta1", "beta2"), "a list of both: [0.9, 0.95]"),
    **dict.fromkeys(("load_in_4bit", "use_4bit", "quantization_bit"), "nf4 or fp4"),
    "no_cuda": "the new name",
    "per_gpu_train_batch_size": "the new name",
    "per_gpu_eval_batch_size": "the new name",
}
"""What to know when writing it there."""

ROWS_ARE_OURS = "rows come in an order that is fixed by the seed, so that a run resumes exactly"
DATA_ARE_OURS = "the data layer reads and tokenises, with its own worker processes"
EVALUATION_IS_OURS = "held-out sets are evaluated by cpt, in loss, perplexity and bits per byte"
BEST_IS_YOURS = "the run's last weights are exported; compare checkpoints by their held-out losses"

NO_EFFECT = {
    "logging_nan_inf_filter": "it is always off: it would log a lost run as loss 0",
    "train_sampling_strategy": ROWS_ARE_OURS,
    "group_by_length": ROWS_ARE_OURS,
    "length_column_name": ROWS_ARE_OURS,
    "ignore_data_skip": "a resumed run starts at the row where the checkpoint stands",
    "dataloader_drop_last": "every step is full",
    "remove_unused_columns": "rows hold the columns that the stage needs, and no others",
    "label_names": "rows hold the columns that the stage needs, and no others",
    "use_cache": "it is always off while training: a cache would let packed documents see each other",
    "auto_find_batch_size": "a batch that changes on the way would change which rows make a step",
    "enable_jit_checkpoint": "it is always off: under DeepSpeed it saves a checkpoint that trains a batch twice",
    "load_best_model_at_end": BEST_IS_YOURS,
    "metric_for_best_model": BEST_IS_YOURS,
    "greater_is_better": BEST_IS_YOURS,
    "save_only_model": "checkpoints are complete, so that a run can resume from each",
    "save_on_each_node": "checkpoints are written once",
    "save_safetensors": "weights are always saved as safetensors",
    "resume_from_checkpoint": "a run resumes by itself from its newest sound checkpoint",
    "logging_dir": "trackers write into the run's folder",
    "disable_tqdm": "cpt shows its own progress",
    "local_rank": "the launcher sets it",
    "prediction_loss_only": EVALUATION_IS_OURS,
    "include_for_metrics": EVALUATION_IS_OURS,
    "include_inputs_for_metrics": EVALUATION_IS_OURS,
    "batch_eval_metrics": EVALUATION_IS_OURS,
    "eval_do_concat_batches": EVALUATION_IS_OURS,
    "eval_use_gather_object": EVALUATION_IS_OURS,
    "eval_accumulation_steps": EVALUATION_IS_OURS,
}
"""Keys of `training:` that would do nothing, with the reason."""

NO_EFFECT_ON_EXAMPLES = {
    "assistant_only_loss": "stage `sft` trains on the assistant's words, always",
    "completion_only_loss": "stage `sft` trains on the completion, always",
    "padding_free": "`data.packing` lays examples out without padding",
    "dataset_text_field": "`data.sources[].text_column` and `chat` say what is where",
    "dataset_kwargs": DATA_ARE_OURS,
    "dataset_num_proc": DATA_ARE_OURS,
    "chat_template_path": "the tokenizer's own template is used: `tokenizer.path`",
    "eos_token": "it is the tokenizer's",
    "pad_token": "it is the tokenizer's",
    "pad_to_multiple_of": DATA_ARE_OURS,
    "shuffle_dataset": ROWS_ARE_OURS,
    "model_init_kwargs": "the `model` section says how it is loaded",
    "precompute_ref_log_probs": (
        "what the reference says of a row is worked out when its turn comes, in any order of rows"
    ),
    "precompute_ref_batch_size": (
        "what the reference says of a row is worked out when its turn comes, in any order of rows"
    ),
    "sync_ref_model": "the reference is the model that the run started from, also after a resume",
}
"""Those of TRL's configs, in our own stages; a stage of the user's may do something with them."""

REMOVED = {
    "include_tokens_per_second": "tokens per second are always logged",
    "fp16_backend": "write `fp16` or `bf16`",
    "half_precision_backend": "write `fp16` or `bf16`",
    "use_mps_device": "the device is found by itself",
    "use_ipex": "the device is found by itself",
    "tpu_num_cores": "the launcher knows it",
    "sharded_ddp": "write `fsdp` or `deepspeed`",
    "fsdp_transformer_layer_cls_to_wrap": "write it in `fsdp_config`",
    "fsdp_min_num_params": "write it in `fsdp_config`",
    "dispatch_batches": "write it in `accelerator_config`",
    "split_batches": "write it in `accelerator_config`",
    "push_to_hub_model_id": "write `hub_model_id`",
    "push_to_hub_organization": "write `hub_model_id: organization/name`",
    "push_to_hub_token": "write `hub_token`",
    "torchdynamo": "write `torch_compile_backend`",
    "ray_scope": "a search has its own recipe",
    "jit_mode_eval": "write `torch_compile`",
    "past_index": "it has no successor",
    "use_legacy_prediction_loop": "it has no successor",
    "mp_parameters": "it has no successor",
}
"""Keys of transformers 4 that are gone, with what to write instead."""


def new_home(key: str) -> str:
    """`optimizer.learning_rate`, with what to know when writing it there."""
    note = f" ({UNITS[key]})" if key in UNITS else ""
    return f"`{dotted(place_of_key(key))}`{note}"


def place_of_key(key: str) -> Location:
    """Where a key of Hugging Face, or a word of another tool, is written here."""
    return MOVED.get(key) or OTHER_WORDS[key]
