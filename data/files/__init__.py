"""Finding samples on the disk: folders, manifests and tars, and the small parts that all of them use."""
