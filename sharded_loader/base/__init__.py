"""Foundation of all other rooms: errors, signals, system calls, non-public names. Imports no other room."""
