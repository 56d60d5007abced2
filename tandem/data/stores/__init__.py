"""Output folders of codes, embeddings and images, which a command continues to fill after it was killed."""
