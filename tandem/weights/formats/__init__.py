"""Reading files from untrusted sources: no code in them is run, nothing outside a model's folder is read for the model,
and no size that a file states makes us allocate memory before the file is known to hold as much data."""
