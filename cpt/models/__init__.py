"""Models: built from a Hub id, a folder or a config; our own families; LoRA; what a model contains."""
