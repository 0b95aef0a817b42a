"""A function of this test on three real daemons: in step, with results, and an exception of one rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import meshtrain as mt
from meshtrain.demo.localmesh import LocalMesh
from meshtrain.notebook.outcome import RunFailed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with LocalMesh(("anna", "bert", "cleo"), print) as started:
        yield started


def test_a_function_trains_on_all_devices_and_its_errors_come_back(
    mesh: LocalMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models end equal, a module beside the notebook is found, and who prepares has none of torchrun's variables."""
    (tmp_path / "beside_it.py").write_text("def greeting(rank):\n    return f'hello from {rank}'\n")
    monkeypatch.chdir(tmp_path)

    def train(rate: float, failing: int | None = None) -> dict[str, object]:
        import os

        import beside_it  # type: ignore[import-not-found]

        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        xs = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(xs, xs.sum(1, keepdim=True))
        prepared, optimizer, loader = mt.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
        if mt.rank() == failing:
            raise ValueError("this is wrong")
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(prepared(x), y)
            loss.backward()
            optimizer.step()
            mt.log(loss=loss)
        mt.finish()
        told = {"said": beside_it.greeting(mt.rank()), "torchrun": "RANK" in os.environ, "ranks": mt.world_size()}
        return {**told, "state": model.state_dict()}

    def exchange() -> tuple[object, ...]:
        import os

        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item(), os.environ["RANK"]

    with mt.session(peers=3, data_dir=mesh.daemons[0].data_dir, env={"OMP_NUM_THREADS": "1"}) as session:
        run = session.run(train, 0.05)
        grouped = session.run(exchange)
        with pytest.raises(RunFailed) as raised:
            session.run(train, 0.05, failing=1)
    assert [each["said"] for each in run.results.values()] == [f"hello from {rank}" for rank in range(3)]
    assert all(each["ranks"] == 3 and not each["torchrun"] for each in run.results.values())
    first = run.result["state"]
    assert all(torch.equal(each["state"]["weight"], first["weight"]) for each in run.results.values())
    assert not torch.equal(first["weight"], torch.zeros(1, 8))
    assert "loss" in run.curves
    assert grouped.results == {rank: (3.0, str(rank)) for rank in range(3)}
    assert raised.value.rank == 1
    assert raised.value.device == "bert"
    assert "in train: ValueError: this is wrong" in str(raised.value)
    assert Path(__file__).name in str(raised.value)
    assert 'raise ValueError("this is wrong")' in raised.value.remote_traceback
