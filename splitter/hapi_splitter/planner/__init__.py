"""The planner: finds the best route weights. Never imports torch.

In: costs per (cut, encoding) and capacities, as plain numbers.
Out: a plan, its alternatives, and the reasons for it.
"""
