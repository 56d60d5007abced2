"""The demonstrations, generated data sets without files."""
