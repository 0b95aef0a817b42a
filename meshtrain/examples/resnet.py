"""ResNet-18 (He et al. 2015, option B shortcuts): a convolutional model with BatchNorm for tests and benchmarks."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


def convolution(channels_in: int, channels_out: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(channels_in, channels_out, 3, stride)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = convolution(channels_out, channels_out, 3, 1)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                convolution(channels_in, channels_out, 1, stride), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Maps images (batch, channels, height, width) to logits (batch, classes); 11,689,512 parameters by default."""

    def __init__(self, num_classes: int = 1000, num_channels: int = 3) -> None:
        super().__init__()
        self.stem = convolution(num_channels, 64, 7, 2)
        self.norm = nn.BatchNorm2d(64)
        self.blocks = nn.Sequential(
            BasicBlock(64, 64, 1),
            BasicBlock(64, 64, 1),
            BasicBlock(64, 128, 2),
            BasicBlock(128, 128, 1),
            BasicBlock(128, 256, 2),
            BasicBlock(256, 256, 1),
            BasicBlock(256, 512, 2),
            BasicBlock(512, 512, 1),
        )
        self.head = nn.Linear(512, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = self.blocks(F.max_pool2d(x, 3, stride=2, padding=1))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits
