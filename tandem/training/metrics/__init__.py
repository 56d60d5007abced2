"""What is measured: averages over batches and processes, quality of reconstructions and of retrieval."""
