"""Records: what storage holds of each sample. Four kinds of sources give numbered records: a folder, tars, a table or
manifest, and a user's own dataset (`opening.py` says which a path stands for); `demo` draws some, and
`tandem.data.fields` decodes them."""
