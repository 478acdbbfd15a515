"""Fine-tune a ResNet-18 on a folder of images."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.models import ResNet18_Weights, resnet18

EPOCHS = 10
weights = ResNet18_Weights.DEFAULT
train = ImageFolder("photos/train", weights.transforms())
val = ImageFolder("photos/val", weights.transforms())

torch.manual_seed(0)
model = resnet18(weights=weights).eval().requires_grad_(False)
model.fc = nn.Linear(512, 3)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.01, momentum=0.9)

for epoch in range(EPOCHS):
    for inputs, labels in DataLoader(train, 64, shuffle=True, num_workers=2):
        loss = criterion(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = total = 0
    with torch.no_grad():
        for inputs, labels in DataLoader(val, 64, num_workers=2):
            right += int((model(inputs).argmax(1) == labels).sum())
            total += len(labels)
    print(f"epoch {epoch}: loss {loss:.4f}, {right} of {total} right")

torch.save(model.state_dict(), "model.pt")
