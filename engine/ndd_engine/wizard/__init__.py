"""From a GPU and a model to a configuration: proposals, their verification, and the TOML.

proposals   the user's goal and limits, and the combinations with predicted memory and time
order       which of them are shown, in which order, and what each gives up
planner     probes each model and turns the results into proposals
session     the whole sequence: proposals, their verification, and the chosen one as commented TOML
"""
