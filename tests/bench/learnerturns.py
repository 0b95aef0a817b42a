"""One process of a side that `learner_path` measures: takes as many steps as it is told, and says how long they took.

It is a job's script, a rank of DDP, or plain torch alone; so it imports nothing of the tests.
"""

import cProfile
import io
import json
import pstats
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch

Step = tuple[torch.nn.Module, torch.optim.Optimizer, Any]
PROFILE_LINES = 45
DDP_TIMEOUT_S = 120


def made(what: str) -> Step:
    """Model, optimizer and a function of the model that gives a loss."""
    torch.manual_seed(0)
    functional = torch.nn.functional
    if what == "resnet":
        from meshtrain.examples.resnet import ResNet18

        model: torch.nn.Module = ResNet18()
        images, labels = torch.randn(16, 3, 64, 64), torch.randint(1000, (16,))
        return model, sgd(model), lambda net: functional.cross_entropy(net(images), labels)
    if what == "gpt":
        from meshtrain.examples.gpt import GPT, GPTConfig

        model = GPT(GPTConfig(context=128, num_layers=6, num_heads=6, width=384))
        tokens = torch.randint(60, (4, 129))
        xs, ys = tokens[:, :-1], tokens[:, 1:].flatten()
        return model, sgd(model), lambda net: functional.cross_entropy(net(xs).flatten(0, 1), ys)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    return model, sgd(model), lambda net: functional.mse_loss(net(x), y)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """What all models are trained with."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def main() -> None:
    """Arguments: side (plain, job, ddp), model, port of who says how many steps; for ddp: rank, members, its store."""
    side, what, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    model, optimizer, loss_of = made(what)
    net, rank = model, 0
    if side == "job":
        import meshtrain as mt

        model, optimizer = mt.prepare(model, optimizer)
        net, rank = model, mt.rank()
        torch.set_num_threads(1)
    elif side == "ddp":
        import torch.distributed as dist

        rank, members, store = int(sys.argv[4]), int(sys.argv[5]), sys.argv[6]
        timeout = timedelta(seconds=DDP_TIMEOUT_S)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=members, timeout=timeout)
        net = torch.nn.parallel.DistributedDataParallel(model)
    with socket.create_connection(("127.0.0.1", port)) as stream, stream.makefile("rw") as lines:
        lines.write(json.dumps({"side": side, "rank": rank, "values": sum(p.numel() for p in model.parameters())}))
        lines.write("\n")
        lines.flush()
        for line in lines:
            told = json.loads(line)
            profile = cProfile.Profile() if told["profile"] else None
            if profile is not None:
                profile.enable()
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            for _ in range(told["steps"]):
                optimizer.zero_grad()
                loss_of(net).backward()
                optimizer.step()
            ended: dict[str, Any] = {"s": time.monotonic() - began_s, "cpu_s": time.process_time() - began_cpu_s}
            if profile is not None:
                profile.disable()
                text = io.StringIO()
                pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(PROFILE_LINES)
                ended["profile"] = text.getvalue()
            lines.write(json.dumps(ended) + "\n")
            lines.flush()
    if side == "job":
        mt.finish()
    elif side == "ddp":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
