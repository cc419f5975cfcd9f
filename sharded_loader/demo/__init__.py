"""What ``sharded-loader demo`` runs: a training run, alone or disturbed.

train      one run: `train.train_and_test`
disturbed  the same run, in a process that is killed and in one that goes on from its checkpoint; or with killed workers

The command itself is `sharded_loader.cli.demo`.
"""
