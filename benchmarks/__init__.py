"""The benchmark: `python -m benchmarks`. See README.md for what its rows mean.

__main__.py   command line; which workloads and loaders, how often
measure.py    rounds of measurements, each in a child process of its own -> results
child.py      one measurement, in that process
workloads.py  the datasets, and what is measured on each
loaders.py    the data loaders, each in its own best form
ceilings.py   the bare limits that ours is compared with
report.py     results -> ratios, bars, tables, picture
"""
