"""The Python API behind `from ndd_engine import …`; see docs/python-api.md.

sources    configurations, runs and values as the functions accept them
record     recorded runs: open_run, Record, find_bottlenecks
training   run_training, Result
measuring  run_trial, predict_memory, MemoryPrediction
"""
