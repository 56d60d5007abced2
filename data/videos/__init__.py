"""Videos: files of them, how their clips are decoded, and the demonstration demo:moving."""
