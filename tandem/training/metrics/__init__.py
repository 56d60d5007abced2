"""The metrics of validations and of evaluate.py: quality of reconstructions, generated images and retrieval;
averages."""
