"""What is written from data: folders of codes, embeddings and images that a killed command goes on filling."""
