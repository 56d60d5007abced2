"""Sources of samples: a folder, tars, a table or manifest, a user's own dataset, and generated ones (`demo`). A source
yields records, undecoded samples by number, which `tandem.data.fields` decodes; `opening.py` chooses it by path."""
