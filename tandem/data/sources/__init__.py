"""Sources of numbered records, the stored content of samples: a folder, tars, a table or manifest, and a user's own
dataset (`opening.py` chooses by path); `demo` generates records, and `tandem.data.fields` decodes them."""
