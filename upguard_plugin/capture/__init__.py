"""From tensors to events, inside the training process."""
