"""What ``sharded-loader demo`` runs: a training run, alone, with its workers killed, or stopped and resumed.

train      one run: `train.train_and_test`
stop       the same run, in a process that is killed, and in one that goes on from its checkpoint
kill       the same run, while its workers are killed

The command itself is `sharded_loader.cli.demo`.
"""
