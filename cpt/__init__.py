"""Continued pre-training of causal language models, and the stages around it, from one YAML recipe."""
