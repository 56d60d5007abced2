"""The order of samples, and the processes that load them."""
