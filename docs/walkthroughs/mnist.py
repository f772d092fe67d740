"""Classifies digits with a small convolutional network: train() and test() per epoch, images decoded in __getitem__."""

import argparse
import math
import random
import zlib

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    """Compressed grey images of 28 x 28, made up here in place of a download."""

    def __init__(self, count, transform=None):
        prototypes = torch.rand(10, 784, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(count)
        self.targets = torch.randint(10, (count,), generator=generator).tolist()
        noise = torch.rand(count, 784, generator=generator)
        pixels = (prototypes[self.targets] * 200 + noise * 55).to(torch.uint8)
        self.files = [zlib.compress(bytes(image.tolist())) for image in pixels]
        self.transform = transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        pixels = zlib.decompress(self.files[index])
        image = torch.tensor([value / 255 for value in pixels]).view(1, 28, 28)
        return (self.transform(image) if self.transform else image), self.targets[index]


def normalize(image):
    return (image - 0.1307) / 0.3081


def augment(image):
    """Rotates by up to ten degrees."""
    angle = math.radians(random.uniform(-10, 10))
    theta = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    grid = F.affine_grid(theta[None], [1, 1, 28, 28], align_corners=False)
    return normalize(F.grid_sample(image[None], grid, align_corners=False)[0])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(2304, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            done = f"{batch_idx * len(data)}/{len(train_loader.dataset)}"
            print(f"Train Epoch: {epoch} [{done}]\tLoss: {loss.item():.6f}", flush=True)


def test(model, device, test_loader):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    count = len(test_loader.dataset)
    print(f"\nTest set: Average loss: {test_loss / count:.4f}, Accuracy: {correct}/{count}\n", flush=True)


def main():
    parser = argparse.ArgumentParser(description="digits")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--test-batch-size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--save-model", action="store_true")
    args = parser.parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(Digits(6000, augment), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(Digits(1000, normalize), batch_size=args.test_batch_size)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    if args.save_model:
        torch.save(model.state_dict(), "mnist_cnn.pt")


if __name__ == "__main__":
    main()
