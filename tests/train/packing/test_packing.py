"""What a job ships: git's choice, told from git itself; and every file that cannot be shipped is named."""

import hashlib
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from meshtrain.packing import tree as packing
from meshtrain.packing.tree import PackError, PackProgress, scan, scan_data
from meshwire import limits
from meshwire.jobs.files import check_manifest


def tree(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def paths(root: Path, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> set[str]:
    return {entry.path for entry in scan(root, include, exclude).manifest.entries}


def test_a_manifest_names_content_size_and_mode(tmp_path: Path) -> None:
    tree(tmp_path, {"train.py": "print()", "run/go.sh": "#!/bin/sh", "empty": ""})
    (tmp_path / "run/go.sh").chmod(0o755)
    packed = scan(tmp_path)
    assert packed.root == tmp_path.resolve()
    assert packed.notes == ()
    assert check_manifest(packed.manifest) is None
    assert [entry.path for entry in packed.manifest.entries] == ["empty", "run/go.sh", "train.py"]
    train = packed.manifest.entries[2]
    assert (train.size_bytes, train.executable) == (7, False)
    assert train.sha256 == hashlib.sha256(b"print()").digest()
    assert packed.manifest.entries[1].executable


def test_the_same_tree_has_the_same_digest(tmp_path: Path) -> None:
    """Files shipped once are found again by content."""
    files = {"b/x": "1", "a": "2", "b.txt": "3"}
    first = scan(tree(tmp_path / "one", files))
    second = scan(tree(tmp_path / "two", dict(reversed(files.items()))))
    assert first.manifest.digest() == second.manifest.digest()


GIT_CASES: dict[str, dict[str, str]] = {
    "plain": {".gitignore": "*.log\nout/\n", "a.log": "", "b/c.log": "", "out/x": "", "b/out/y": "", "k.py": ""},
    "anchored": {".gitignore": "/data\n", "data/x": "", "sub/data/y": "", "k.py": ""},
    "nested": {".gitignore": "*.bin\n", "m/.gitignore": "!keep.bin\n/own\n", "m/keep.bin": "", "m/x.bin": ""}
    | {"keep.bin": "", "m/own": "", "own": "", "m/n/keep.bin": ""},
    "nothing is kept inside an ignored folder": {".gitignore": "out/\n!out/keep\n", "out/keep": "", "k": ""},
    "folder contents": {".gitignore": "out/*\n!out/keep\n", "out/keep": "", "out/x": "", "out/d/keep": ""},
    "only some": {".gitignore": "*\n!*/\n!*.py\n", "a.py": "", "b/c.py": "", "b/d.txt": "", "e.txt": ""},
    "folder mark": {".gitignore": "cache/\n", "cache": "", "b/cache/x": ""},
    "stars": {
        ".gitignore": "a/**/z\n**/q\nw/**\n",
        "a/z": "",
        "a/b/c/z": "",
        "q": "",
        "x/q/y": "",
        "w/1/2": "",
        "z": "",
    },
    "comments and spaces": {".gitignore": "# no\n\\#yes\nx \ny\\ \n\n", "#yes": "", "# no": "", "x": "", "k": ""},
    "ranges": {".gitignore": "f[0-2].txt\ng?.txt\n", "f1.txt": "", "f3.txt": "", "g1.txt": "", "g12.txt": ""},
    "deep rules win": {".gitignore": "!*.x\n", "d/.gitignore": "*.x\n", "a.x": "", "d/b.x": "", "d/e/c.x": ""},
    "all folders at depth": {
        ".gitignore": "*.txt\n!**/*/\n**/*/\n!/a/\n",
        "a/b.txt": "",
        "a/c/d": "",
        "a/e": "",
        "f": "",
    },
    "inside but not itself": {".gitignore": "w/**\n!w/keep\n", "w/keep": "", "w/x": "", "w/d/keep": ""},
    "equal names": {".gitignore": "a/\n!/a/\n/x/a\n", "a/f": "", "a/a/g": "", "x/a": "", "y/a": "", "z/a/q": ""},
    "kept and left again": {
        ".gitignore": "*.py\n!m*.py\nmain.py\n",
        "m.py": "",
        "main.py": "",
        "d/mm.py": "",
        "n.py": "",
    },
    "odd patterns": {".gitignore": "/\n[\n***\n!k*\n//x\n!*/\n", "k.py": "", "x": "", "d/k": "", "d/l": ""},
    "windows lines": {".gitignore": "*.log\r\nout/\r\n", "a.log": "", "out/x": "", "k": ""},
    "everything": {".gitignore": "*\n", "a": "", "b/c": ""} | {"keep/.gitignore": "!*\n", "keep/x": ""},
    "star folder": {".gitignore": "/*\n!/src/\n", "src/a.py": "", "src/b/c.py": "", "lib/d.py": "", "e": ""},
}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("case", GIT_CASES)
@pytest.mark.parametrize("below", ["", "sub"])
def test_gitignore_means_what_git_means(tmp_path: Path, case: str, below: str) -> None:
    """.gitignore honoured at every level, also above the submitted folder; git itself says what is right."""
    root = tree(tmp_path / below, GIT_CASES[case] | {"always.txt": ""})
    if below:
        tree(tmp_path, {".gitignore": "*.log\n/sub/k.py\n!*.bin\n", "other": ""})
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}
    options: dict[str, object] = {"cwd": root, "env": environment, "check": True, "timeout": 20}
    subprocess.run(["git", "init", "-q", str(tmp_path)], **options)  # type: ignore[call-overload]
    listed = subprocess.run(  # type: ignore[call-overload]
        ["git", "ls-files", "-z", "--others", "--exclude-standard"], capture_output=True, text=True, **options
    )
    expected = {path for path in listed.stdout.split("\0") if path}
    if not expected:  # git lets nothing through: shipping nothing is an error of its own
        with pytest.raises(PackError, match="no file to ship"):
            scan(root)
    else:
        assert paths(root) == expected


def test_a_folder_that_its_repository_ignores_ships_when_submitted(tmp_path: Path) -> None:
    tree(tmp_path, {".git/HEAD": "", ".gitignore": "scratch/\n*.py\n"})
    tree(tmp_path / "scratch/a", {"train.py": "", ".gitignore": "*.log\n", "x.log": ""})
    assert paths(tmp_path / "scratch") == {"a/train.py", "a/.gitignore"}
    assert paths(tmp_path / "scratch/a") == {"train.py", ".gitignore"}


def test_rules_above_a_folder_without_a_repository_do_not_hold(tmp_path: Path) -> None:
    tree(tmp_path, {".gitignore": "*.py\n", "job/train.py": ""})
    assert paths(tmp_path / "job") == {"train.py"}


def test_what_is_of_no_use_elsewhere_stays(tmp_path: Path) -> None:
    tree(tmp_path, {"a.py": "", "a.pyc": "", "p/__pycache__/a.pyc": "", ".git/config": "", "p/.git": "gitdir: x"})
    tree(tmp_path, {".venv/pyvenv.cfg": "", ".venv/bin/python": "", "other/pyvenv.cfg": "", "venv/plain.txt": ""})
    (tmp_path / "linked").symlink_to(tmp_path / ".venv")
    packed = scan(tmp_path, include=("*",))
    assert {entry.path for entry in packed.manifest.entries} == {"a.py", "venv/plain.txt"}
    assert [note.split()[0] for note in packed.notes] == [".venv", "linked", "other"]


def test_a_line_that_is_no_pattern_is_named(tmp_path: Path) -> None:
    tree(tmp_path, {"a/.gitignore": "x\n!\n", "b": ""})
    with pytest.raises(PackError, match=r"a/\.gitignore: '!' is not a pattern"):
        scan(tmp_path)
    with pytest.raises(PackError, match=r"--include: '!' is not a pattern"):
        scan(tmp_path, include=("!",))


def test_include_overrides_git_and_exclude_overrides_all(tmp_path: Path) -> None:
    tree(tmp_path, {".gitignore": "data/\n*.txt\n", "data/a.txt": "", "data/deep/b.bin": "", "c.txt": "", "d.py": ""})
    assert paths(tmp_path) == {".gitignore", "d.py"}
    assert paths(tmp_path, include=("*.bin",)) == {".gitignore", "d.py", "data/deep/b.bin"}
    assert paths(tmp_path, include=("data/",)) == {".gitignore", "d.py", "data/deep/b.bin", "data/a.txt"}
    assert paths(tmp_path, include=("data/",), exclude=("deep",)) == {".gitignore", "d.py", "data/a.txt"}
    assert paths(tmp_path, exclude=("/d.py",)) == {".gitignore"}


SECRETS = (
    *(".env", ".env.local", "conf/prod.env", ".envrc", ".netrc", "_netrc", ".pgpass", ".pypirc", ".npmrc", ".htpasswd"),
    *(".git-credentials", ".docker/config.json", "keys/id_ed25519", "keys/id_rsa", "keys/id_work", "ID_RSA"),
    *("a.pem", "tls/server.key", "a.p12", "a.pfx", "a.kdbx", "credentials.json", "client_secret_12.json"),
    *("service_account.json", "kaggle.json", "secrets.yaml", "huggingface/token", "data-a/identity/device.pem"),
    *("kubeconfig", "rclone.conf", "Credentials.json"),
)
SECRET_FOLDERS = (".ssh", ".aws", ".gnupg", ".azure", ".kube", "home/.config/gcloud", "home/.config/gh", ".kaggle")
NO_SECRETS = (
    *("train.py", ".env.example", ".env.template", "id_map.py", "id_tokens.json", "id_rsa.pub", "keys/id_ed25519.pub"),
    *("secrets.py", "token.json", "tokenizer.json", "keys.py", "environment.yml", "credentials.py", "pem.py"),
    *("id_images/0.png", ".docker/Dockerfile", "huggingface/tokenizer", "config/gcloud", "envs/.envs", "key"),
)


@pytest.mark.parametrize("path", [*SECRETS, *(f"{folder}/x/y" for folder in SECRET_FOLDERS)])
def test_what_looks_like_a_secret_stays_here_and_is_named(tmp_path: Path, path: str) -> None:
    """It once went to every device of the job, without a word."""
    packed = scan(tree(tmp_path, {"train.py": "", path: "hunter2"}))
    assert [entry.path for entry in packed.manifest.entries] == ["train.py"]
    named = path.removesuffix("x/y")
    assert packed.notes == (f"left out, it looks like a secret: {named}; --include PATTERN ships it",)
    for pattern in (path, path.rpartition("/")[2], "*"):
        packed = scan(tmp_path, [pattern])
        assert path in {entry.path for entry in packed.manifest.entries}, pattern
        assert packed.notes[-1] == f"shipped because of --include, though it looks like a secret: {path}"


def test_what_scripts_need_is_no_secret(tmp_path: Path) -> None:
    packed = scan(tree(tmp_path, dict.fromkeys(NO_SECRETS, "")))
    assert {entry.path for entry in packed.manifest.entries} == set(NO_SECRETS)
    assert packed.notes == ()


def test_secrets_are_named_in_one_line_once(tmp_path: Path) -> None:
    """Those that git leaves out anyway are nobody's surprise; those in a folder of secrets go with its name."""
    files = {".gitignore": "*.key\nb\n", "a.key": "", "b/.env": "", ".env": "", ".ssh/id_rsa": "", ".ssh/config": ""}
    tree(tmp_path, files | {"train.py": "", "keys/id_ed25519": "", "two\nlines.pem": ""})
    (tmp_path / "link.pem").symlink_to("/etc/passwd")
    packed = scan(tmp_path, exclude=[".env"])
    assert {entry.path for entry in packed.manifest.entries} == {".gitignore", "train.py"}
    names = ".ssh/, keys/id_ed25519, link.pem, 'two\\nlines.pem'"
    assert packed.notes == (
        f"left out, they look like secrets: {', '.join(sorted(names.split(', ')))}; --include PATTERN ships them",
    )
    many = scan(tree(tmp_path / "many", dict.fromkeys(["a", *(f"{n:02}.pem" for n in range(13))], "")))
    assert many.notes[0].count(".pem") == 10
    assert "09.pem and 3 more; --include" in many.notes[0]


def test_a_pattern_ships_the_secrets_that_it_names_and_no_others(tmp_path: Path) -> None:
    """`--include build/` is said of a build that git ignores."""
    tree(tmp_path, {".gitignore": "build\n", "build/a.so": "", "build/.env": "", "build/.ssh/id_rsa": "", "t.py": ""})
    tree(tmp_path, {".ssh/config": "", ".ssh/deep/id_rsa": "", ".aws/credentials": ""})
    assert paths(tmp_path, ("build/",)) == {".gitignore", "build/a.so", "t.py"}
    assert "build/.env, build/.ssh/" in scan(tmp_path, ["build/"]).notes[0]
    assert paths(tmp_path, ("build/", ".env")) == {".gitignore", "build/.env", "build/a.so", "t.py"}
    assert paths(tmp_path, ("/.ssh/",)) == {".gitignore", ".ssh/config", ".ssh/deep/id_rsa", "t.py"}
    assert paths(tmp_path, (".ssh/config",)) == {".gitignore", ".ssh/config", "t.py"}
    assert paths(tmp_path, ("/.ssh", "!.ssh/deep")) == {".gitignore", ".ssh/config", "t.py"}
    assert paths(tmp_path, ("/.ssh",), ("id_rsa",)) == {".gitignore", ".ssh/config", "t.py"}


def test_a_data_folder_keeps_back_only_what_can_be_nothing_else(tmp_path: Path) -> None:
    """Images may be called id_0001 and sensors' files *.key; nobody trains on a folder called .ssh."""
    data = {"id_0001": "", "a.key": "", "certificates/b.pem": "", "credentials.json": ""}
    tree(tmp_path, data | {".env": "", "home/.ssh/id_rsa": "", "id_ed25519": ""})
    packed = scan_data(tmp_path)
    assert {entry.path for entry in packed.manifest.entries} == set(data)
    assert packed.notes == (
        "left out of the data folder, they look like secrets: .env, home/.ssh/, id_ed25519; "
        "--include PATTERN ships them",
    )
    packed = scan_data(tmp_path, include=["*"])
    assert len(packed.manifest.entries) == len(data) + 3


def test_a_link_is_refused_by_name_unless_left_out(tmp_path: Path) -> None:
    """A link means another file elsewhere, or none: it is never shipped and never followed."""
    tree(tmp_path, {"train.py": "", "real/x": ""})
    (tmp_path / "data").symlink_to("real")
    (tmp_path / "real/loop").symlink_to("..")
    (tmp_path / "gone").symlink_to("/nowhere")
    with pytest.raises(PackError) as caught:
        scan(tmp_path)
    for words in ("data: a symbolic link (to real)", "real/loop: a symbolic link", "gone: a symbolic link", "--data"):
        assert words in str(caught.value)
    assert paths(tmp_path, exclude=("data", "loop", "gone")) == {"train.py", "real/x"}
    (tmp_path / ".gitignore").write_text("/data\nloop\ngone\n")
    assert paths(tmp_path) == {".gitignore", "train.py", "real/x"}


def test_the_submitted_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    tree(tmp_path / "real", {"train.py": ""})
    (tmp_path / "link").symlink_to("real")
    assert scan(tmp_path / "link").root == (tmp_path / "real").resolve()


def test_sockets_and_pipes_are_left_out_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, {"train.py": ""})
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("sock")
        packed = scan(tmp_path)
    assert [entry.path for entry in packed.manifest.entries] == ["train.py"]
    assert [note.split()[0] for note in packed.notes] == ["pipe", "sock"]


def test_unreadable_files_and_folders_are_named(tmp_path: Path) -> None:
    tree(tmp_path, {"train.py": "", "secret": "", "closed/x": ""})
    (tmp_path / "closed").chmod(0)
    if os.access(tmp_path / "closed", os.R_OK):
        pytest.skip("this user (root) may read anything")
    with pytest.raises(PackError, match="closed: the folder cannot be read: Permission denied"):
        scan(tmp_path)
    (tmp_path / "closed").chmod(0o755)
    (tmp_path / "secret").chmod(0)
    with pytest.raises(PackError, match="secret: cannot be read: Permission denied"):
        scan(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a file vanishes between finding and reading it."""
    tree(tmp_path, {"train.py": "", "volatile.tmp": ""})
    hash_files = packing._hash

    def vanish_then_hash(*arguments: object) -> object:
        (tmp_path / "volatile.tmp").unlink()
        return hash_files(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(packing, "_hash", vanish_then_hash)
    with pytest.raises(PackError, match=r"volatile\.tmp: cannot be read: No such file"):
        scan(tmp_path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["Model.py", "model.py"], "'Model.py' and 'model.py' differ in upper and lower case only"),
        (["Data/a", "data/b"], "folders 'Data' and 'data'"),
        (["aux.py"], "aux.py: its path has a part 'aux.py', which is a device on Windows"),
        (["a:b"], "a:b: its path contains a colon"),
        (["a\nb"], r"'a\nb': its path contains a control character"),
        (["cafe\u0301"], "normal form NFC"),
        ([os.fsdecode(b"caf\xe9")], r"'caf\udce9': its path is not valid Unicode"),
    ],
)
def test_names_that_other_systems_refuse_are_named(tmp_path: Path, files: list[str], words: str) -> None:
    """ECOSYSTEM 2.4: told to the submitter, before anything is sent."""
    tree(tmp_path, dict.fromkeys(files, ""))
    if len(list(tmp_path.iterdir())) != len({file.split("/")[0] for file in files}):
        pytest.skip("this file system takes these names for one")
    with pytest.raises(PackError) as caught:
        scan(tmp_path)
    assert words in str(caught.value)
    str(caught.value).encode()


def test_many_problems_are_shortened(tmp_path: Path) -> None:
    tree(tmp_path, {f"x{number}:": "" for number in range(packing.PROBLEMS_SHOWN + 3)})
    with pytest.raises(PackError, match=r"\.\.\. and 3 more"):
        scan(tmp_path)


def test_too_much_names_the_largest_files_and_the_way_out(tmp_path: Path) -> None:
    """Sizes are summed before anything is read: the sparse file here would take minutes."""
    tree(tmp_path, {f"small{number}": "x" for number in range(10)})
    with (tmp_path / "weights.ckpt").open("wb") as file:
        file.truncate(limits.SOURCE_BYTES_MAX)
    with pytest.raises(PackError, match=r"512\.0 MiB\s+weights\.ckpt") as caught:
        scan(tmp_path)
    for hint in ("--exclude", ".gitignore", "--data", "at most 512.0 MiB"):
        assert hint in str(caught.value)
    assert len(paths(tmp_path, exclude=("*.ckpt",))) == 10


def test_too_many_files_stop_the_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILES_MAX", 5)
    tree(tmp_path, {f"{number}": "" for number in range(5)})
    assert len(paths(tmp_path)) == 5
    (tmp_path / "5").touch()
    with pytest.raises(PackError, match=r"more than 5 files.*--data"):
        scan(tmp_path)


def test_no_folder_and_nothing_to_ship(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="gone is not a folder"):
        scan(tmp_path / "gone")
    with pytest.raises(PackError, match="no file to ship"):
        scan(tmp_path)
    with pytest.raises(PackError, match="no file to ship"):
        scan_data(tmp_path)


def test_a_data_folder_ships_whole(tmp_path: Path) -> None:
    """The data folder is shipped also when git ignores it."""
    tree(tmp_path, {".git/HEAD": "", ".gitignore": "data\n", "data/.gitignore": "*\n", "data/x.bin": "1"})
    packed = scan_data(tmp_path / "data")
    assert [entry.path for entry in packed.manifest.entries] == [".gitignore", "x.bin"]


def test_progress_is_told_and_ends_within_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PROGRESS_EVERY_S", 0.0)
    tree(tmp_path, {"a": "x" * 10, "b": "y" * 20})
    told: list[PackProgress] = []
    scan(tmp_path, on_progress=told.append)
    assert told[0].files_done == 0
    assert told[-1] == PackProgress(files_done=1, files_found=2, bytes_done=30, bytes_found=30)
    assert all(progress.bytes_done <= progress.bytes_found for progress in told)
