"""The parts of `sharded_loader.torch.DataLoader`: torch's meaning over this library's engine.

For: programs and trainers that expect torch's class.
Costs: about 1,300 lines. The core imports nothing of this, and asks for what trainers do by name.
Tests: tests/drop_in, and torch's and other libraries' own tests.
It goes when: torch's class has what this one adds.
"""
