"""What every pool works with: tasks and results, the plan of an epoch, the batches in flight, the reader."""
