"""REINFORCE: each laptop plays its own episodes, and all learn from all of them.

    meshtrain submit reinforcement.py

There is no data set, so `mt.prepare` gets no loader: each laptop makes its samples itself, from a seed of its own, and
`mt.steps(n)` ends the loop after n steps on all of them.
"""

import torch
from torch import Tensor, nn

import meshtrain as mt

STEPS = 150
GAMES = 32  # in each step on each laptop
LENGTH = 16
PLACES = 9


def play(policy: nn.Module, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """A walker on a line, who is rewarded for standing in its middle: (log-probabilities, rewards), [games, LENGTH]."""
    place = torch.randint(0, PLACES, (GAMES,), generator=dice)
    chosen, rewards = [], []
    for _ in range(LENGTH):
        logits = policy(nn.functional.one_hot(place, PLACES).float()).log_softmax(1)
        move = torch.multinomial(logits.exp().detach(), 1, generator=dice)
        place = (place + move[:, 0] - 1).clamp(0, PLACES - 1)
        chosen.append(logits.gather(1, move)[:, 0])
        rewards.append(1.0 - (place - PLACES // 2).abs() / PLACES)
    return torch.stack(chosen, 1), torch.stack(rewards, 1)


torch.manual_seed(0)
policy: nn.Module = nn.Sequential(nn.Linear(PLACES, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
policy, optimizer = mt.prepare(policy, optimizer)
dice = torch.Generator().manual_seed(1000 + mt.rank())  # other games on each laptop

for step in mt.steps(STEPS):
    chosen, rewards = play(policy, dice)
    to_come = rewards.flip(1).cumsum(1).flip(1)
    loss = -(chosen * (to_come - to_come.mean(0))).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mt.log(loss=loss, reward=rewards.mean())
    if mt.is_main() and step % 25 == 0:
        print(f"step {step}: reward {rewards.mean().item():.3f}", flush=True)
mt.finish()
