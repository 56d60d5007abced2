"""Images: sets of them, how they are decoded and augmented, and the demonstration demo:shapes."""
