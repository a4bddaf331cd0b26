"""The schedule of a learning-rate range test, by the door that users' own schedules come through."""


def exponential(tokens: float, total_tokens: float, *, lowest: float, highest: float = 1.0) -> float:
    """Grow by the same factor in each step, from `lowest` to `highest` times the recipe's learning rate (arXiv
    1506.01186)."""
    return float(highest * (lowest / highest) ** (1 - min(1.0, tokens / total_tokens)))
