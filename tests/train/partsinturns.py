"""Training in which parts of a model take turns: what tests of runs of tensors and of drawn values have in common."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshtrain.train.session import LearnerSession
from tests.train.localdaemon import LocalDaemon
from tests.train.replicas import Batch, assert_equal, batch, net, sgd, step

EPOCHS = 2
Make = Callable[[nn.Module], torch.optim.Optimizer]


def batch_of(rank: int, number: int, count: int = 4) -> Batch:
    return batch(100 * rank + number, count)


def trained(
    make: Make, steps: int, *, members: int = 2, norm: bool = False, same_data: bool = False, **spec: Any
) -> list[nn.Sequential]:
    """All replicas behind so many local steps, which are equal, as their bases were at each hash."""
    replicas = [net(norm=norm) for _ in range(members)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], make(replicas[rank]))
        for number in range(steps):
            step(model, optimizer, batch_of(0 if same_data else rank, number))

    with LocalDaemon(members, **spec) as daemon:
        daemon.run(script)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
    assert_equal(replicas)
    return replicas


def whole_epochs(sync: str, total: int) -> LocalDaemon:
    """Trains on EPOCHS epochs of so many samples. Behind each all replicas are the base (R9), and each sample was in
    one round (X1). Returns the daemons, which are closed."""
    dataset = TensorDataset(torch.arange(total), *batch_of(9, 1, total))
    replicas = [net() for _ in range(2)]
    at_ends: list[list[nn.Module]] = [[], []]

    def script(session: LearnerSession, rank: int) -> list[list[int]]:
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
        model, optimizer, loader = session.prepare_with_loader(replicas[rank], sgd(replicas[rank]), loader)
        seen: list[list[int]] = []
        for _ in range(EPOCHS):
            seen.append([])
            for indices, x, y in loader:
                seen[-1] += indices.tolist()
                step(model, optimizer, (x, y))
            own = copy.deepcopy(model)
            with session.base():
                assert_equal([own, model])
            at_ends[rank].append(own)
        return seen

    with LocalDaemon(2, sync=sync) as daemon:
        seen = daemon.run(script)
    for epoch in range(EPOCHS):
        assert sorted(index for rank in seen for index in rank[epoch]) == list(range(total))
        assert_equal([at_ends[0][epoch], at_ends[1][epoch]])
    assert_equal(replicas)
    binds = [bind for each in daemon.rounds.rounds.values() for bind in each.binds.values()]
    assert sum(block.end - block.first for bind in binds for block in bind.samples) == EPOCHS * total
    return daemon
