"""From numbered batches of indices to finished batches, in order: pools of workers and what drives them."""
