"""Diffusion: noise schedules, losses, and samplers, for any network that denoises."""
