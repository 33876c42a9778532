"""Processes: from the dataset to the training loop."""
