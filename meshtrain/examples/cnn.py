"""A small convolutional network with BatchNorm, for images of one channel."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshtrain.train.partial.progressive import Progressive

WIDTHS = (16, 32, 64)


class CNN(nn.Module):
    """Maps images (batch, 1, 28, 28) to logits (batch, classes); 98,554 parameters for ten classes.

    Three times a convolution of 3 x 3, BatchNorm, and half the height and width; then two linear layers.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in zip((1, *WIDTHS), WIDTHS, strict=False):
            layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Linear(WIDTHS[-1] * 3 * 3, 128)
        self.head = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.hidden(self.features(x).flatten(1)))
        logits: Tensor = self.head(x)
        return logits


def growing_cnn(every: int, warmup: int = 0, classes: int = 10) -> Progressive:
    """The same network in four stages: its convolutions one after the other, then the hidden layer. The heads of the
    first three average over what is left of the image.

    Args:
        every, warmup: rounds, as of `Progressive`.
    """
    whole = CNN(classes)
    layers = list(whole.features)
    of_stage = len(layers) // len(WIDTHS)
    stages = [nn.Sequential(*layers[first : first + of_stage]) for first in range(0, len(layers), of_stage)]
    stages.append(nn.Sequential(nn.Flatten(), whole.hidden, nn.ReLU()))
    heads = [nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)) for width in WIDTHS]
    return Progressive(stages, [*heads, whole.head], every, warmup)
