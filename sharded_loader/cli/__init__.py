"""The command ``sharded-loader``: a module for each verb, and the parts that they share.

main --> doctor
     --> bench      target --> measure
     --> records    and ``index``
     --> runs       ``diff``, ``demo`` (the run itself is in ``sharded_loader.demo``)
All of them print through output.
"""
