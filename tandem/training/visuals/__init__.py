"""Pictures of a model's outputs, for samples/ and the trackers."""
