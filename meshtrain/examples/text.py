"""Real text that every machine has: the source of Python's standard library. Nothing here needs torch.

Python versions differ in their sources, so peers must not each gather this text: the submitter writes it
to a file, and the file travels with the job.
"""

import math
import sysconfig
from collections import Counter
from pathlib import Path

# Large pure-Python modules that are single files in every Python since 3.11.
MODULES = (
    "argparse",
    "ast",
    "calendar",
    "codecs",
    "configparser",
    "contextlib",
    "csv",
    "dataclasses",
    "difflib",
    "dis",
    "doctest",
    "enum",
    "fractions",
    "ftplib",
    "functools",
    "gettext",
    "heapq",
    "inspect",
    "ipaddress",
    "locale",
    "mailbox",
    "optparse",
    "os",
    "pdb",
    "pickle",
    "pickletools",
    "platform",
    "plistlib",
    "random",
    "shutil",
    "smtplib",
    "socket",
    "ssl",
    "statistics",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "tokenize",
    "traceback",
    "typing",
    "uuid",
)

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
OTHER = len(ALPHABET)  # the token of every character outside ALPHABET
VOCABULARY_SIZE = len(ALPHABET) + 1
_TOKENS = {character: token for token, character in enumerate(ALPHABET)}


def stdlib_text(max_bytes: int, stdlib: Path | None = None) -> str:
    """The sources of MODULES joined in order and cut to `max_bytes` of ASCII, other characters left out.

    The result depends on the Python version alone. Raises FileNotFoundError when `stdlib` (default: this
    Python's) lacks the sources or holds fewer than `max_bytes`.
    """
    folder = stdlib or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for module in MODULES:
        if len(text) >= max_bytes:
            break
        path = folder / f"{module}.py"
        try:
            text += path.read_text(encoding="utf-8").encode("ascii", errors="ignore")
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path} is missing: this Python is installed without its standard library's sources. "
                "Use another text file, or a full installation of Python"
            ) from error
    if len(text) < max_bytes:
        raise FileNotFoundError(f"the sources in {folder} hold {len(text)} bytes, {max_bytes} were asked for")
    return text[:max_bytes].decode("ascii")


def encode(text: str) -> bytes:
    """One token per character, each below VOCABULARY_SIZE."""
    return bytes(_TOKENS.get(character, OTHER) for character in text)


def unigram_entropy(text: str) -> float:
    """Entropy of the token frequencies, in nats per character: the loss of a model without context."""
    tokens = encode(text)
    if not tokens:
        raise ValueError("an empty text has no entropy")
    return -sum(n / len(tokens) * math.log(n / len(tokens)) for n in Counter(tokens).values())
