"""Metrics: averages over batches and processes, quality of reconstructions, generated images and retrieval."""
