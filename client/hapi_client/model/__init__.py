"""The model on the client: frozen region, packages, model registry.

In: a user's ``nn.Module`` or a model name, and a freeze point.
Out: the frozen region to cut, its package in Swift, and the frozen layers
that run on the client.
"""
