"""What may stop or change a run."""
