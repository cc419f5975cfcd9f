"""What other libraries need beyond a loader: one module for each. None of them is imported by this library itself.

For: Accelerate, which rebuilds the loaders that it is given.
Costs: about 240 lines. The core imports nothing of this.
Tests: tests/integrations; `make test-frameworks`.
It goes when: the libraries take any loader as it is.
"""
