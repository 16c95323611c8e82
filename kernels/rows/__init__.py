"""The inputs of a step, gathered from the tables of rows.

batch_inputs: a step's inputs, gathered on the device from the stable request rows, and the sampled tokens written
    back to them
"""
