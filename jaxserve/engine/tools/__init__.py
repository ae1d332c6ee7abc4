"""Calls of functions and reasoning in what a model writes: one parser for each format that models were trained on."""
