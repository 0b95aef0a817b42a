"""Text as a map-style data set of next-character prediction."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from meshtrain.examples.text import encode


class CharDataset(Dataset[tuple[Tensor, Tensor]]):
    """Window i holds tokens [i*context, (i+1)*context) as x and the same shifted by one as y, both int64.

    Windows do not overlap, so an epoch predicts each character once. A tail shorter than a window is left out.
    """

    def __init__(self, text: str, context: int) -> None:
        self.tokens = torch.frombuffer(bytearray(encode(text)), dtype=torch.uint8)
        self.context = context
        if len(self) < 1:
            raise ValueError(f"a text of {len(text)} characters is too short for a context of {context}")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.context
        window = self.tokens[start : start + self.context + 1].long()
        return window[:-1], window[1:]
