"""The command line: the parser, the YAML file behind --config, and the flags that several scripts share."""
