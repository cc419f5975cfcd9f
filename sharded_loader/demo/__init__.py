"""The command ``sharded-loader demo``: a training run, alone, with its workers killed, or stopped and resumed.

cli -> train                                one run: `train.train_and_test`
    -> stop   --starts--> stop.main         the same run in a process that is killed and resumed
    -> kill   --during the run--> SIGKILL   the same run while its workers are killed
"""
