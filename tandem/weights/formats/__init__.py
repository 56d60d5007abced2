"""Files of public packages. They are untrusted: no code in them is run, no file outside a model's folder is read, and
memory for a size that a file states is allocated after a check that the file holds as much data."""
