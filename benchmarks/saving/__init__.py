"""What a transactional save costs compared with the Trainer's, and how long training stalls."""
