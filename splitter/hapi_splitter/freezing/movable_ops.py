"""Operations that the freeze point moves over.

They have no parameters and are deterministic: freezing them changes nothing
of what is trained. The sum at the end of a residual block is one of them.
Dropout and batch norm are not among them. What is not
listed simply stays in the tail.
"""

from __future__ import annotations

import operator as operator_module

import torch
from torch import nn
from torch.nn import functional as F

MOVABLE_MODULES = (
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.ReLU,
    nn.ReLU6,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.SiLU,
    nn.GELU,
    nn.Mish,
    nn.ELU,
    nn.LeakyReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
    nn.Flatten,
    nn.Unflatten,
    nn.Identity,
)
MOVABLE_FUNCTIONS = frozenset(
    {
        torch.flatten,
        torch.relu,
        torch.sigmoid,
        torch.tanh,
        torch.mean,
        torch.permute,
        torch.transpose,
        torch.reshape,
        torch.squeeze,
        torch.unsqueeze,
        F.relu,
        F.relu6,
        F.hardswish,
        F.hardsigmoid,
        F.silu,
        F.gelu,
        F.elu,
        F.leaky_relu,
        F.adaptive_avg_pool2d,
        F.avg_pool2d,
        F.max_pool2d,
        operator_module.add,
        operator_module.iadd,
        operator_module.getitem,
        torch.add,
        getattr,
    }
)
MOVABLE_METHODS = frozenset(
    {
        "flatten",
        "relu",
        "sigmoid",
        "tanh",
        "mean",
        "permute",
        "transpose",
        "view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "contiguous",
        "size",
    }
)
