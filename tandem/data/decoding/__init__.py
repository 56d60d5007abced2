"""Decoding of the files of samples: no more of a file is read and decoded than the sample needs."""
