"""Adversarial and contrastive losses, and updates whose results do not depend on how a batch is divided."""
