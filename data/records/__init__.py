"""Records: what storage holds of each sample. Four kinds of sources give numbered records: a folder, tars, a table or
manifest, and a user's own dataset (`opening.py` says which a path stands for); `data.demo` draws some, and
`data.fields` decodes them."""
