"""Operations over which the freeze point may move.

They have no parameters and are deterministic, so that freezing them does not
affect training. An example is the sum at the end of a residual block. Dropout
and batch norm are not included. All other operations stay in the tail.
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
