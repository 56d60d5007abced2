"""Sounds with captions: manifests, folders and tars of them, how they are decoded, and the demonstration demo:tones."""
