"""What a model is judged by: held-out text and samples."""
