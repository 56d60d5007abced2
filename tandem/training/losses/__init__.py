"""Adversarial and contrastive losses, random numbers of diffusion, and updates whose results do not depend on how a
batch is divided."""
