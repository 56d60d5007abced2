"""Decoding of the files of samples. Each decoder reads and decodes no more of a file than the sample needs."""
