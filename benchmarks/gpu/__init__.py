"""The names of the commands in `qa.gpu`."""
