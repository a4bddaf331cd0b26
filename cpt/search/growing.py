"""The schedule of a learning-rate range test, by the door that users' own schedules come through."""


def exponential(tokens: float, total_tokens: float, *, lowest: float) -> float:
    """Grow by the same factor in each step, from `lowest` times the highest learning rate up to it (arXiv 1506.01186)."""
    return float(lowest ** (1 - min(1.0, tokens / total_tokens)))
