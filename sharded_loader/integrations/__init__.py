"""What other libraries need beyond a loader: one module for each. None of them is imported by this library itself."""
