"""Loading and publishing trained models: run folders, formats of other packages, the Hugging Face Hub."""
