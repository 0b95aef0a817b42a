"""Write an example into a user's folder: what `meshtrain init --example NAME` does. Nothing here needs torch."""

from importlib.resources import files
from pathlib import Path

from meshtrain.examples.text import stdlib_text

EXAMPLES = ("gpt", "mlp")
TEXT_BYTES = 1_000_000


def write_example(name: str, target: Path) -> list[Path]:
    """Write the example's files into `target`, which is made when missing, and return their paths.

    Writes nothing and raises ValueError for an unknown name, NotADirectoryError when `target` is a file,
    FileExistsError naming every file that would be overwritten.
    """
    if name not in EXAMPLES:
        raise ValueError(f"no example is called {name!r}; there are {', '.join(EXAMPLES)}")
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; name a folder for the example")
    templates = files("meshtrain.examples") / "templates"
    contents = {
        "train.py": (templates / name / "train.py").read_text(encoding="utf-8"),
        ".gitignore": (templates / "gitignore").read_text(encoding="utf-8"),
    }
    if name == "gpt":
        contents["data/input.txt"] = stdlib_text(TEXT_BYTES)

    paths = {target / relative: content for relative, content in contents.items()}
    existing = [str(path) for path in paths if path.exists() or path.is_symlink()]
    if existing:
        raise FileExistsError(f"not overwritten: {', '.join(existing)}; move them away or name another folder")
    for path, content in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(content)
    return list(paths)
