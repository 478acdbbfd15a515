"""Files of weights for torchvision's models."""

import pytest
import torch
import torchvision

from hapi_client.model.torchvision_registry import from_checkpoint
from hapi_protocol.errors import ClientError


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"tail": {}}, "it has no 'fc.weight'; give a file such as --save"),
        (len, "no file of torch.save, or has more than tensors; give"),
    ],
)
def test_file_of_something_else_is_refused(tmp_path, content, reason):
    path = tmp_path / "model.pt"
    torch.save(content, path)
    with pytest.raises(ClientError) as caught:
        from_checkpoint(torchvision.models.resnet18, path)
    assert f"{path} is not a state dict of this model: " in str(caught.value)
    assert reason in str(caught.value)
    assert "weights_only" not in str(caught.value)
