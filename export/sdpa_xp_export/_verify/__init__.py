"""The judge: what a model is tried with, what should come, and when two results agree.

    model            the model, and the call that it has to compute
    call_cases       the table of cases of a call
    layer_cases      the table of cases of a layer
    case_lengths     the lengths of a case
    inputs           the inputs of a case
    cases            a case; cases run in an engine, and are judged together
    reference        attention in float64, and the textbook formula
    expected         what these give for a case
    layer            a layer in float64 and in the dtype of its inputs
    judging          the rule
    files            inputs and results of a layer in a file; the verdict in that of a model

The judge imports nothing of what writes graphs.
"""
