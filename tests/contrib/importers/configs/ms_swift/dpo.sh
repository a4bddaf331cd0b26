torchrun --nproc_per_node=2 --nnodes 2 swift/cli/rlhf.py \
    --rlhf_type dpo --model example/chat --train_type lora --lora_rank 16 --quant_method bnb --quant_bits 4 \
    --dataset pairs.jsonl --columns '{"query": "query", "response": "response", "rejected_response": "rejected_response"}' \
    --loss_type sigmoid --beta 0.2 --learning_rate 5e-6 --use_hf true --report_to tensorboard wandb 2>&1 | tee log.txt &
