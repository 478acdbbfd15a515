"""Output of ``hapi plan``: the study of a plan as tables, figure, page.

In: a model, a data set or assumptions, a link.
Out: tables, JSON, PNG or HTML that compare the plan with its alternatives.
"""
