"""The judge: what a model is tried with, what should come, and when two results agree.

model          the model, and the call that it has to compute
call_cases, layer_cases   the table of cases of a call and of a layer, with `lengths` and `inputs`
cases          a case; cases run in an engine, and are judged together
reference      float64 and the textbook formula; `expected` is what they give for a case
layer          a layer in float64 and in the dtype of its inputs
judging        the rule
golden, record   files of inputs and results, and the verdict in a file
"""
