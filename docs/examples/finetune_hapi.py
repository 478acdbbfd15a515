"""Fine-tune a ResNet-18 on a folder of images."""

import torch
from hapi_client import FeatureDataset, split_model
from torch import nn
from torchvision.models import ResNet18_Weights, resnet18

EPOCHS = 10
weights = ResNet18_Weights.DEFAULT

torch.manual_seed(0)
model = resnet18(weights=weights).eval().requires_grad_(False)
model.fc = nn.Linear(512, 3)
frozen, tail = split_model(model, "avgpool", transform=weights.transforms())
train = FeatureDataset("swift://photos/train", frozen, batch_size=64)
val = FeatureDataset("swift://photos/val", frozen, shuffle=False)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.01, momentum=0.9)

for epoch in range(EPOCHS):
    train.set_epoch(epoch)
    for inputs, labels in train:
        loss = criterion(tail(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = total = 0
    with torch.no_grad():
        for inputs, labels in val:
            right += int((tail(inputs).argmax(1) == labels).sum())
            total += len(labels)
    print(f"epoch {epoch}: loss {loss:.4f}, {right} of {total} right")

torch.save(model.state_dict(), "model.pt")
