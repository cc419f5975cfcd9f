"""What ``sharded-loader demo`` runs: a training run, alone or disturbed (`train`).

The command itself is `sharded_loader.cli.runs`.
"""
