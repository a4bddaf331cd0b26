#!/bin/bash
# Continue the pre-training of a base model on two corpora.
gpus=4
MODEL=${MODEL:-example/base-7b}

PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
NPROC_PER_NODE=$gpus \
swift pt \
    --model $MODEL \
    --tuner_type full \
    --dataset example/web:zh#20000 corpus/papers.jsonl \
    --interleave_prob 0.7 0.3 \
    --columns '{"content": "text"}' \
    --torch_dtype bfloat16 \
    --max_length 8192 \
    --packing true \
    --max_steps 1000 \
    --learning_rate 1e-5 \
    --gradient_accumulation_steps $(expr 64 / $gpus) \
    --lr_scheduler_type cosine_with_min_lr \
    --lr_scheduler_kwargs '{"min_lr": 1e-6}' \
    --warmup_ratio 0.05 \
    --save_steps 500 \
    --split_dataset_ratio 0.01 \
    --deepspeed zero3 \
    --attn_impl flash_attn \
    --use_liger_kernel \
    --sequence_parallel_size 2 \
    --output_dir output/base-7b \
    "$@"
