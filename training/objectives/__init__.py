"""What is minimised: adversarial and contrastive losses, and the updates that are exact however a batch is cut."""
