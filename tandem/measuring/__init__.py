"""What evaluate.py measures of trained models, on any number of processes."""
