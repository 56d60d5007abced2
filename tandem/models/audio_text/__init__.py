"""MuLan: sounds and texts in one space."""
