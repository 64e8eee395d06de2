"""The judge of any attention function: hard cases as data, what it means by attention, and where it is wrong.

    cases.json       the cases, the questions, and how known functions are called
    cases            a case, and its arrays, which follow from a seed
    semantics        what attention of a case is, for each answer to the questions
    function         how a function of a user, or a model, is called
    judgement        the questions, the cases, and the smallest calls that fail
    verdict          what is found: a profile, then faults

It shares no code with what computes attention in the library, and knows nothing of what writes graphs.
"""
