"""The command ``sharded-loader``: a module for each verb, and the parts that they share.

main --> demo       trains a small network (the run itself is in ``sharded_loader.demo``)
     --> doctor
     --> bench      target --> measure
     --> records (and ``index``), runs (``diff``, ``replay``, ``report``)
All of them print through output.
"""
