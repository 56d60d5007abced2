"""Trained models by whatever name a user gives them; formats of other packages; the Hugging Face Hub."""
