"""Pictures of what a model does, for samples/ and the trackers."""
