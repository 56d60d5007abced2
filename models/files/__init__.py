"""Reading files from anywhere: no code in them is run, nothing outside a model folder is read for it, and no number in
them takes memory before the file has shown as much data."""
