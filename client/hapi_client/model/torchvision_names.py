"""Names of torchvision's models, found without importing it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

_REGISTERED = re.compile(r"^@register_model\(\).*?^def (\w+)\(", re.M | re.S)


def classifier_names() -> list[str]:
    """Of the models that classify images, as in ``torchvision.models``.

    Empty where there is no torchvision.  It takes seconds to import, which
    nobody who presses TAB waits for: its files are read instead.
    """
    found = find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        return []
    folder = Path(found.submodule_search_locations[0]) / "models"
    return sorted(
        name
        for path in folder.glob("*.py")
        for name in _REGISTERED.findall(path.read_text())
    )
