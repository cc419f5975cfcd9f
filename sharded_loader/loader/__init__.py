"""The loader itself: arguments, epochs, iterators, statistics."""
