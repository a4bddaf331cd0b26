"""Evaluate models: held-out text, questions, tasks, samples, and the verdict on a run."""
