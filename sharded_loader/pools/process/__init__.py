"""Worker processes: how they are started, what one does, and the pipe to it. A worker imports no pool."""
