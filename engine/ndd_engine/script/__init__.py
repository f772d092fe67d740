"""Any training script, observed while it runs: a command in a process of its own, its records, and the run they become.

command   the command: what it is called, and whether it can be observed
launch    starts it, on a terminal of its own or with the streams of the caller
records   reads what the observer writes, one file per process
facts     turns records into the events of a run
run       the run: folder, record, control, and the end
"""
