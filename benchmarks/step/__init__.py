"""What the host does in a training step besides the model's own operations: ours beside a bare loop and beside the
plain Trainer."""
