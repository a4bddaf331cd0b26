"""What the guards and flags of a run cost in a step."""
