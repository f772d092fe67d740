"""From "this card, this model" to a configuration that can be trusted: proposals, their verification, the TOML.

answers     what the user wants: goal and limits
space       which combinations of batch, sequence, size, precision and placement are worth predicting
proposals   each of them with predicted memory and time, and what it costs; which of them nothing beats
plan        probes one model after the other and turns what they find into proposals
session     all of it in order, for the screen and the command line
verify      the best ones measured, beside what was predicted
writing     the chosen one as commented TOML, new or into a file that exists
"""
