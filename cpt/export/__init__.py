"""A model that plain transformers loads: exported, merged, quantised, proven by its logits."""
