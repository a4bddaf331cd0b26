"""What the data's index costs at two billion to two trillion tokens."""
