"""The parts of `sharded_loader.torch.DataLoader`: torch's meaning over this library's engine."""
