"""Models that turn images and videos into codes or latents and back, and their discriminators."""
