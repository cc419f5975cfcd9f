"""How a batch, and the dataset, get from one process into another."""
