"""Frozen public networks, whose features are compared by losses and metrics, or are conditions of models."""
