"""Classify images with the trained model."""

import sys

import torch
from torch import nn
from torchvision.io import decode_image
from torchvision.models import ResNet18_Weights, resnet18

CLASSES = ["astronaut", "cat", "coffee"]  # the folders' names, sorted

model = resnet18()
model.fc = nn.Linear(512, len(CLASSES))
model.load_state_dict(torch.load("model.pt"))
model.eval()
transform = ResNet18_Weights.DEFAULT.transforms()

for path in sys.argv[1:]:
    image = decode_image(path, "RGB")
    with torch.no_grad():
        scores = model(transform(image)[None])[0].softmax(0)
    best = int(scores.argmax())
    print(f"{path}: {CLASSES[best]} ({scores[best]:.0%})")
