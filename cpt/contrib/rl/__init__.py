"""Reinforcement learning besides TRL's stable trainers: PPO and SPO."""
