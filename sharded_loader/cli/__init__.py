"""The command ``sharded-loader``: a module for each verb, and the parts that they share.

main --> commands --> demo       trains a small network (the run itself is in ``sharded_loader.demo``)
                  --> doctor     facts --> findings
                  --> bench      target --> measure --> advice
                  --> records    packing, examine
All of them print through output.
"""
