"""Runs the plan of a step: device rows, input gathering, the model, sampling. It never decides who runs."""
