"""Lines of metrics, and where they are shown and written."""
