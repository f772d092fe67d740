"""From a GPU and a model to a configuration: proposals, their verification, and the TOML.

answers     the user's goal and limits
space       the combinations of batch, sequence, model size and precision to predict
proposals   combinations with predicted memory, time and cost, and the Pareto front
planner     probes each model and turns the results into proposals
session     the whole sequence, for the screen and the command line
verify      trains the best proposals for a few seconds and measures them
writing     the chosen proposal as commented TOML, new or edited into an existing file
"""
