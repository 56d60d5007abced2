"""Engines: one model and its optimizer, spread over the processes; and the sums, norms and states that they share."""
