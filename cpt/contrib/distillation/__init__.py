"""Learn from another model: distillation from a teacher, and `replay_kl`, which keeps a model close to its base."""
