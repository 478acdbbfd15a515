"""Names of torchvision's models, read without importing torchvision.

Importing takes seconds, too long for shell completion.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

_REGISTERED = re.compile(r"^@register_model\(\).*?^def (\w+)\(", re.M | re.S)


def classifier_names() -> list[str]:
    """Returns the names of image classifiers in ``torchvision.models``.

    The list is empty without torchvision.
    """
    spec = find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(spec.submodule_search_locations[0]) / "models"
    return sorted(
        name
        for path in folder.glob("*.py")
        for name in _REGISTERED.findall(path.read_text())
    )
