"""Train a small GPT to write text, character by character.

    python train.py                           on this machine alone
    meshtrain submit --data data train.py     on all your machines

Any text will do: put your own into data/input.txt. Arguments go after the script, e.g. `train.py --steps 500`.
"""

import argparse

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import meshtrain as mt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300, help="how many times the weights are updated")
parser.add_argument("--batch-size", type=int, default=16, help="windows of text per step on each machine")
parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

CONTEXT = 64  # characters that the model looks back at
WIDTH = 144  # numbers that describe each character on its way through the model
LAYERS = 4
HEADS = 4


# -- The text: cut into windows of characters; the model predicts the next character at every place.


class Windows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * CONTEXT
        window = self.tokens[start : start + CONTEXT + 1]
        return window[:-1], window[1:]  # what is seen, and what comes next


# -- The model: characters become vectors, blocks let them exchange information, the head guesses what follows.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # each place sees only the past
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, time, WIDTH))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


@torch.no_grad()
def write(model: nn.Module, start: list[int], length: int) -> list[int]:
    """Continue `start` by drawing one character after another from the model's predictions."""
    tokens = list(start)
    for _ in range(length):
        seen = torch.tensor([tokens[-CONTEXT:]], device=mt.device())
        probabilities = model(seen)[0, -1].softmax(dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1)))
    return tokens


# -- Training. The lines with `mt.` are all that makes it run on several machines; alone they do nothing.

torch.manual_seed(args.seed)
text = (mt.data_dir() / "input.txt").read_text(encoding="utf-8")
alphabet = sorted(set(text))
number = {character: i for i, character in enumerate(alphabet)}
tokens = torch.tensor([number[character] for character in text])

model: nn.Module = GPT(len(alphabet))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
loader = DataLoader(Windows(tokens), batch_size=args.batch_size, shuffle=True)
model, optimizer, loader = mt.prepare(model, optimizer, loader)

step = 0
while step < args.steps:
    for x, y in loader:  # every machine gets other windows
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()  # here the gradients of all machines are averaged
        optimizer.step()
        mt.log(loss=loss)
        step += 1
        if step % 10 == 0 and mt.is_main():
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        if step == args.steps:
            break

if mt.is_main():  # one machine is enough to save the result; `meshtrain get` fetches it from any of them
    torch.save(model.state_dict(), mt.output_dir() / "model.pt")
    sample = "".join(alphabet[token] for token in write(model, tokens[:CONTEXT].tolist(), length=300))
    (mt.output_dir() / "sample.txt").write_text(sample, encoding="utf-8")
    print(sample)
mt.finish()
