"""What encode.py does with the samples of a kind: it encodes them, and decodes what was stored."""
