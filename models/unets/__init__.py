"""Parts of the conditional Unet of DALL-E 2's decoder, with the parameter names of DALLE2-pytorch."""
