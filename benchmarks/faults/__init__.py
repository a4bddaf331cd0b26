"""Every fault that a run meets, injected into real runs of ours and of the plain Trainer."""
