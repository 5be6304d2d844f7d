"""Rewards: score functions, the processes and the sandbox they run in, the reward workers."""
