"""Files that by their names hold keys, passwords or tokens: no job takes them along unless it is told to."""

from collections.abc import Sequence

from meshtrain.packing.gitignore import Ignored, glob_rules

# In .gitignore's notation, in lower case; the last that names a path decides. Public keys (*.pub) are no secrets.
_ANYWHERE = (
    *(".env", ".env.*", "!.env.example", "!.env.sample", "!.env.template", "!.env.dist", ".envrc"),
    *(".ssh", ".gnupg", ".password-store", "**/.local/share/keyrings"),
    *(".aws", ".azure", "**/.config/gcloud", ".boto", ".s3cfg", "**/.config/rclone", "rclone.conf"),
    *(".kube", "kubeconfig", "*.kubeconfig", "**/.docker/config.json", ".dockercfg", ".dockerconfigjson"),
    *(".netrc", "_netrc", ".pgpass", ".my.cnf", ".htpasswd", ".vault-token", ".databrickscfg"),
    *(".git-credentials", "**/.config/gh", ".pypirc", ".npmrc", "**/.cargo/credentials", "**/.cargo/credentials.toml"),
    *("**/huggingface/token", "**/huggingface/stored_tokens", ".hf_token", ".kaggle", "kaggle.json"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk"),
    *("*.ppk", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx"),
    *(".bash_history", ".zsh_history", ".python_history"),
    "**/identity/device.pem",  # a daemon's own, where its data folder lies in the working directory
)
# Where people write code, these are secrets; in a data set they may be anything, and a sample too few is noticed late.
_IN_CODE = (
    *("id_*", "!id_*.*", "*.pem", "*.key", "*.p8", "*.env", "!example.env", "!sample.env"),
    *("credentials", "credentials.json", "application_default_credentials.json", "client_secret*.json"),
    *("service-account*.json", "service_account*.json", "hf_token", "hf_token.txt", "*.tfstate"),
    *(".secrets", "secrets.json", "secrets.yaml", "secrets.yml", "secrets.toml"),
)

SHOWN = 10


class SecretNames:
    """Which names are those of secrets.

    Args:
        in_code: in a working directory; else in a folder of data.
    """

    def __init__(self, *, in_code: bool) -> None:
        self._anywhere: Ignored = glob_rules(_ANYWHERE, "")
        self._files: Ignored = glob_rules(_IN_CODE if in_code else (), "")

    def names(self, path: str, is_folder: bool) -> bool:
        """Whether a file has such a name.

        Args:
            path: relative to the folder that is shipped, POSIX.
        """
        path = path.lower()
        if self._anywhere.decide(path, is_folder):
            return True
        return not is_folder and bool(self._files.decide(path, is_folder))


def left_out(paths: Sequence[str], where: str) -> str:
    """One line that tells a person what was left out."""
    looks, ships = ("it looks like a secret", "it") if len(paths) == 1 else ("they look like secrets", "them")
    return f"left out{where}, {looks}: {_listed(paths)}; --include PATTERN ships {ships}"


def shipped(paths: Sequence[str], where: str) -> str:
    """One line for a person who has included them."""
    looks = "it looks like a secret" if len(paths) == 1 else "they look like secrets"
    return f"shipped{where} because of --include, though {looks}: {_listed(paths)}"


def _listed(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:SHOWN])
    return f"{shown} and {len(paths) - SHOWN} more" if len(paths) > SHOWN else shown
