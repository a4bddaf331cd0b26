"""What optimizers in little memory lose beside AdamW over fp32 weights, at learning rates of continued
pre-training."""
