"""The benchmark: `python -m benchmarks`. See README.md for what its rows mean.

__main__.py   command line; which workloads and loaders, how often
measure.py    rounds of measurements, each in a child process of its own -> results
child.py      one measurement, in that process
samples.py    the datasets
workloads.py  what is measured on them, and the order of the samples
plans.py      what every loader is given
loaders.py    the data loaders, each in its own best form: ours, torch's, and the table of all
other_loaders.py  the other libraries
ceilings.py   the bare limits that ours is compared with
report.py     results -> ratios, bars, sentences, tables
pictures.py   results -> pictures
"""
