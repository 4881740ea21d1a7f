"""Owns the model, the data and the training, as in Flower's quickstart; it knows neither Flower nor Offbeat."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TEST_SAMPLES = 360
BATCH_SIZE = 10


class Net(nn.Module):
    """64 pixels, one hidden layer with BatchNorm, ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.layers(pixels)
        return logits


def load_data(partition: int, partitions: int) -> DataLoader[tuple[Tensor, ...]]:
    """The training images of one node: every n-th of all, n being the number of partitions."""
    pixels, labels = _images()
    mine = torch.arange(TEST_SAMPLES + partition, len(labels), partitions)
    return DataLoader(TensorDataset(pixels[mine], labels[mine]), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)


def train(net: nn.Module, loader: DataLoader[tuple[Tensor, ...]], lr: float, epochs: int = 1) -> float:
    """Train with plain SGD on the node's data; returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for pixels, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(pixels), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net: nn.Module) -> tuple[float, float]:
    """Loss and accuracy on the test images, which no node has."""
    pixels, labels = _images()
    pixels, labels = pixels[:TEST_SAMPLES], labels[:TEST_SAMPLES]
    net.eval()
    with torch.no_grad():
        logits = net(pixels)
    loss = nn.functional.cross_entropy(logits, labels).item()
    return loss, (logits.argmax(1) == labels).float().mean().item()


def _images() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
