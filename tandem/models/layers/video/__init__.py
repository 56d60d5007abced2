"""Layers of the video tokenizer: causal in time, so that a frame never depends on a later one."""
