"""Write models that plain transformers loads: export, merge, quantise, and verify the logits."""
