"""What every room stands on: errors, signals, system calls, names. It imports no other room."""
