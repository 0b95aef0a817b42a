"""The example models and scripts do what the demo and the benchmarks rely on."""

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import meshtrain
from meshtrain.examples import digits, init, text, train_cnn, train_gpt
from meshtrain.examples.cnn import CNN, growing_cnn
from meshtrain.examples.dataset import CharDataset
from meshtrain.examples.gpt import GPT, GPTConfig
from meshtrain.examples.init import write_example
from meshtrain.examples.resnet import ResNet18


class World:
    """The training API in a world of one, with its folders; `logged` is what the script reported."""

    def __init__(self, data: Path, output: Path) -> None:
        self.data, self.output = data, output
        self.logged: list[float] = []
        self.finished = False
        data.mkdir(exist_ok=True)
        output.mkdir(exist_ok=True)

    def log(self, loss: torch.Tensor) -> None:
        self.logged.append(loss.item())

    def finish(self) -> None:
        self.finished = True

    def run(self, script: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        api = {
            "prepare": lambda model, optimizer, loader: (model, optimizer, loader),
            "log": self.log,
            "finish": self.finish,
            "rank": lambda: 0,
            "world_size": lambda: 1,
            "is_main": lambda: True,
            "device": lambda: torch.device("cpu"),
            "data_dir": lambda: self.data,
            "output_dir": lambda: self.output,
        }
        for name, function in api.items():
            monkeypatch.setattr(meshtrain, name, function, raising=False)
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")
        assert self.finished


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "data", tmp_path / "output")


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Models


def test_resnet18_has_the_published_number_of_parameters() -> None:
    assert count(ResNet18()) == 11_689_512


def test_resnet18_maps_images_of_any_size_to_logits() -> None:
    model = ResNet18(num_classes=10, num_channels=1)
    assert model(torch.zeros(2, 1, 32, 40)).shape == (2, 10)


def test_gpt_has_about_a_million_parameters() -> None:
    assert count(GPT(GPTConfig())) == 1_040_256


def test_gpt_is_causal() -> None:
    """A prediction does not depend on the characters after it."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=8, num_layers=2, num_heads=2, width=16)).eval()
    tokens = torch.randint(0, text.VOCABULARY_SIZE, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = 0
    torch.testing.assert_close(model(tokens)[:, :5], model(changed)[:, :5])


def test_gpt_starts_from_a_nearly_uniform_prediction() -> None:
    torch.manual_seed(0)
    loss = nn.functional.cross_entropy(
        GPT(GPTConfig())(torch.zeros(1, 64, dtype=torch.long)).flatten(0, 1), torch.arange(64)
    )
    assert loss.item() == pytest.approx(math.log(text.VOCABULARY_SIZE), rel=0.05)


def test_gpt_refuses_what_its_sizes_do_not_allow() -> None:
    with pytest.raises(ValueError, match="width 10 is not divisible by num_heads 4"):
        GPTConfig(width=10, num_heads=4)
    with pytest.raises(ValueError, match="9 tokens, but the context holds 8"):
        GPT(GPTConfig(context=8, width=8))(torch.zeros(1, 9, dtype=torch.long))


def test_the_cnn_is_small_and_has_batchnorm() -> None:
    model = CNN()
    assert count(model) == 98_554
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 3


# Text


def test_tokens_cover_ascii_and_one_symbol_for_the_rest() -> None:
    assert list(text.encode("\n ~")) == [0, 1, 95]
    assert list(text.encode("\té")) == [text.OTHER, text.OTHER]
    assert text.OTHER == text.VOCABULARY_SIZE - 1


def test_unigram_entropy_of_known_texts() -> None:
    assert text.unigram_entropy("aaaa") == 0
    assert text.unigram_entropy("abab") == pytest.approx(math.log(2))
    assert text.unigram_entropy("aabc") == pytest.approx(1.5 * math.log(2))
    with pytest.raises(ValueError, match="empty"):
        text.unigram_entropy("")


def test_stdlib_text_is_cut_exactly_and_the_same_every_time() -> None:
    short, long = text.stdlib_text(100_000), text.stdlib_text(1_000_000)
    assert len(short) == 100_000
    assert long.startswith(short)
    assert long.isascii()
    assert 2.8 < text.unigram_entropy(long) < 3.4


def test_stdlib_text_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"argparse\.py is missing"):
        text.stdlib_text(10, stdlib=tmp_path)
    for module in text.MODULES:
        (tmp_path / f"{module}.py").write_text("pass\n")
    with pytest.raises(FileNotFoundError, match=f"hold {5 * len(text.MODULES)} bytes, 1000000 were asked for"):
        text.stdlib_text(1_000_000, stdlib=tmp_path)


def test_windows_predict_every_character_once() -> None:
    content = text.stdlib_text(1000)
    dataset = CharDataset(content, context=16)
    predicted = torch.cat([y for _, y in (dataset[i] for i in range(len(dataset)))])
    assert predicted.tolist() == list(text.encode(content))[1 : len(dataset) * 16 + 1]
    x, y = dataset[3]
    assert x.dtype == y.dtype == torch.int64
    assert x[1:].tolist() == y[:-1].tolist()


def test_windows_bounds() -> None:
    assert len(CharDataset("a" * 17, context=16)) == 1
    with pytest.raises(ValueError, match="too short"):
        CharDataset("a" * 16, context=16)
    with pytest.raises(IndexError):
        CharDataset("a" * 17, context=16)[1]


# Digits


def write_digits(folder: Path, images: object, labels: object) -> None:
    folder.mkdir(exist_ok=True)
    np.savez(folder / digits.FILE_NAME, images=np.asarray(images), labels=np.asarray(labels))


def test_digits_come_back(tmp_path: Path) -> None:
    images = np.arange(6 * 28 * 28).reshape(6, 28, 28).astype(np.uint8)
    write_digits(tmp_path, images, np.arange(6, dtype=np.uint8))
    found, labels = digits.read_digits(tmp_path)
    assert (found == images).all()
    assert labels.tolist() == list(range(6))


def test_digits_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(digits.DigitsError, match=r"digits\.npz is missing: write it with `python -m"):
        digits.read_digits(tmp_path)
    (tmp_path / digits.FILE_NAME).write_bytes(b"no archive")
    with pytest.raises(digits.DigitsError, match="holds no digits"):
        digits.read_digits(tmp_path)
    blank = np.zeros((2, 28, 28), np.uint8)
    for images, labels in (
        (blank[:, :27], np.zeros(2, np.uint8)),
        (blank, np.zeros(3, np.uint8)),
        (blank.astype(np.float32), np.zeros(2, np.uint8)),
        (blank, np.full(2, 10, np.uint8)),
        (blank[:0], np.zeros(0, np.uint8)),
    ):
        write_digits(tmp_path, images, labels)
        with pytest.raises(digits.DigitsError, match="not digits"):
            digits.read_digits(tmp_path)
    write_digits(tmp_path, np.array([object()]), np.zeros(1, np.uint8))  # only pickle could read it
    with pytest.raises(digits.DigitsError, match="holds no digits"):
        digits.read_digits(tmp_path)


def test_a_package_with_other_digits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "_packed", lambda: b"other images")
    with pytest.raises(digits.DigitsError, match="do not use it"):
        digits.fetch_digits(tmp_path / "data")
    assert not (tmp_path / "data").exists()


# Scripts


def test_train_cnn_reads_what_it_was_not_trained_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten shapes under noise stand for the digits, which a test does not fetch."""
    rng = np.random.default_rng(0)
    shapes, labels = rng.integers(0, 256, (10, 28, 28)), np.arange(100, dtype=np.uint8) // 10
    write_digits(
        world.data, np.clip(shapes[labels] + rng.normal(0, 40, (100, 28, 28)), 0, 255).astype(np.uint8), labels
    )
    world.run(Path(train_cnn.__file__), ["--steps", "30", "--batch-size", "10"], monkeypatch)
    metrics = json.loads((world.output / "metrics.json").read_text())
    assert metrics["losses"] == world.logged
    assert metrics["held_out_accuracy"] > 0.9
    restored = CNN()
    restored.load_state_dict(torch.load(world.output / "model.pt", weights_only=True))
    assert restored.features[1].num_batches_tracked == 30


def test_the_cnn_that_grows_is_the_cnn_in_the_end() -> None:
    model = growing_cnn(every=1)
    x = torch.rand(2, 1, 28, 28)
    for number in (1, 2, 3, 4):
        model.enter_round(number)
        assert model(x).shape == (2, 10)
    final = [*model.stages.parameters(), *model.heads[-1].parameters()]
    assert [p.shape for p in final] == [p.shape for p in CNN().parameters()]


def test_train_cnn_names_what_is_missing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="submit with --data data"):
        world.run(Path(train_cnn.__file__), [], monkeypatch)


@pytest.mark.slow
def test_train_gpt_learns_more_than_character_frequencies(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    content = text.stdlib_text(200_000)
    (world.data / "input.txt").write_text(content)
    world.run(Path(train_gpt.__file__), ["--steps", "40", "--batch-size", "16"], monkeypatch)

    metrics = json.loads((world.output / "metrics.json").read_text())
    assert metrics["losses"] == world.logged
    assert (metrics["steps"], metrics["samples"], metrics["world_size"]) == (40, 640, 1)
    assert metrics["unigram_entropy"] == text.unigram_entropy(content)
    assert sum(world.logged[-5:]) / 5 < metrics["unigram_entropy"] - 0.3

    restored = GPT(GPTConfig())
    restored.load_state_dict(torch.load(world.output / "model.pt", weights_only=True))
    x, y = next(iter(DataLoader(Subset(CharDataset(content, 64), range(0, 3000, 100)), batch_size=30)))
    loss = nn.functional.cross_entropy(restored(x).flatten(0, 1), y.flatten())
    assert loss.item() < metrics["unigram_entropy"] - 0.2


def test_train_gpt_goes_on_into_the_next_epoch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.data / "input.txt").write_text(text.stdlib_text(8 * 3 + 1))
    sizes = ["--context", "8", "--width", "8", "--layers", "1", "--heads", "1", "--batch-size", "2"]
    world.run(Path(train_gpt.__file__), ["--steps", "5", *sizes], monkeypatch)
    assert len(world.logged) == 5
    assert json.loads((world.output / "metrics.json").read_text())["samples"] == 2 + 1 + 2 + 1 + 2


def test_train_gpt_refuses_zero_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        world.run(Path(train_gpt.__file__), ["--steps", "0"], monkeypatch)


# Templates


@pytest.mark.slow
def test_gpt_template_runs_as_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = world.data.parent
    written = write_example("gpt", folder)
    assert [path.relative_to(folder).as_posix() for path in written] == ["train.py", ".gitignore", "data/input.txt"]
    assert len((folder / "train.py").read_text().splitlines()) < 150
    world.run(folder / "train.py", ["--steps", "10", "--batch-size", "8"], monkeypatch)
    assert world.logged[-1] < world.logged[0] - 1
    assert len((world.output / "sample.txt").read_text()) == 64 + 300
    assert (world.output / "model.pt").exists()


def test_mlp_template_runs_as_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = world.data.parent
    assert [path.name for path in write_example("mlp", folder)] == ["train.py", ".gitignore"]
    world.run(folder / "train.py", [], monkeypatch)
    assert max(world.logged[-5:]) < 0.2


def test_write_example_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "input.txt").write_text("mine too")
    with pytest.raises(FileExistsError, match=r"train\.py, .*input\.txt"):
        write_example("gpt", tmp_path)
    assert (tmp_path / "train.py").read_text() == "mine"
    assert not (tmp_path / ".gitignore").exists()


def test_write_example_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no example is called 'bert'; there are gpt, mlp"):
        write_example("bert", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        write_example("mlp", tmp_path / "file")
    assert [path.exists() for path in write_example("mlp", tmp_path / "new" / "folder")] == [True, True]


def test_writing_an_example_needs_no_torch(tmp_path: Path) -> None:
    """torch is never imported by the command line's start-up (DESIGN section 3)."""
    code = (
        "import sys, pathlib; from meshtrain.examples.init import write_example; "
        f"write_example('gpt', pathlib.Path({str(tmp_path)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert (tmp_path / "data" / "input.txt").stat().st_size == init.TEXT_BYTES
