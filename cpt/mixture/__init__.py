"""What a run will see of each source, told before it starts."""
