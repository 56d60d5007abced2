"""Output folders of codes, embeddings and images, which the same command continues after an interruption."""
