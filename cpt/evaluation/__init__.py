"""Evaluate models: held-out text, domain test, tasks, samples, and the verdict on a run."""
