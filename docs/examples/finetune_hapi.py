"""Fine-tune a ResNet-18 on a folder of images."""

import torch
from hapi_client import TransferJob
from torch import nn
from torchvision.models import ResNet18_Weights, resnet18

EPOCHS = 10
weights = ResNet18_Weights.DEFAULT
data = {"train": "swift://photos/train", "val": "swift://photos/val"}
options = {"transform": weights.transforms(), "batch_size": 64}

torch.manual_seed(0)
model = resnet18(weights=weights).eval().requires_grad_(False)
model.fc = nn.Linear(512, 3)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.01, momentum=0.9)
job = TransferJob(model, freeze="avgpool", data=data, **options)

for epoch in range(EPOCHS):
    for inputs, labels in job.loader(epoch):
        loss = criterion(job.tail(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = total = 0
    with torch.no_grad():
        for inputs, labels in job.loader(split="val"):
            right += int((job.tail(inputs).argmax(1) == labels).sum())
            total += len(labels)
    print(f"epoch {epoch}: loss {loss:.4f}, {right} of {total} right")

torch.save(model.state_dict(), "model.pt")
