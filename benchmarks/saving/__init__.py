"""What a transactional save costs beside the Trainer's own, and for how long training stands still."""
