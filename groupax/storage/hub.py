"""Folders to the Hugging Face hub. Imports no jax."""

import os
from pathlib import Path

from groupax.errors import RunError
from groupax.storage.manifest import MANIFEST


def push_folder(folder: str | os.PathLike[str], repo_id: str, private: bool = True) -> str:
    """Upload a folder as a model repository, which is made if there is none, and return its address.

    The token is that of the environment (HF_TOKEN) or of `hf auth login`. An upload that broke off goes on when it is
    called again: what has arrived is not sent twice.

    Args:
        folder: of a model or an adapter.
        repo_id: "owner/name", or a name in the token's own namespace.
        private: of a repository that is made; one that exists stays as it is.

    Raises:
        ValueError: there is no such folder or no token, or the hub refuses token, name or rights.
        RunError: the hub cannot be reached, or the connection broke.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    )

    folder = Path(folder)
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} holds no model: it has neither config.json nor adapter_config.json")
    if get_token() is None:
        raise ValueError("there is no token for the hub; set HF_TOKEN to one that may write, or run `hf auth login`")
    api = HfApi()
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=address.repo_id,
            folder_path=folder,
            commit_message=f"Upload {folder.name} with groupax",
            ignore_patterns=[MANIFEST, ".*.partial-*"],
        )
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is no name of a repository: {error}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reasons = {
            401: "the hub refuses the token; check HF_TOKEN",
            403: f"the token may not write to {repo_id}; take one with write access to it",
            404: f"the hub has no {repo_id} that the token may see",
        }
        if status in reasons:
            raise ValueError(f"{reasons[status]} (status {status}: {error.server_message or 'no message'})") from error
        raise RunError(_broken(folder, repo_id, f"status {status}: {error.server_message or error}")) from error
    except (HTTPError, ConnectionError, RuntimeError) as error:  # the client tells of failed uploads as RuntimeError
        reason = error.__cause__ or error
        raise RunError(_broken(folder, repo_id, f"{type(reason).__name__}: {reason}")) from error
    return str(address)


def _broken(folder: Path, repo_id: str, reason: str) -> str:
    return (
        f"the upload of {folder} to {repo_id} broke off ({reason}). Nothing is lost: the folder is as it was, and the "
        "same command goes on with what has not arrived"
    )
