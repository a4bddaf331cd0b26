"""What a checkpoint becomes: an exported model."""
