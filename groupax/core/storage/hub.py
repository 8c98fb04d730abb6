"""Uploads of folders to the Hugging Face Hub. Imports no jax."""

import os
from pathlib import Path

from groupax.core.errors import RunError
from groupax.core.storage.replacing import MANIFEST


def push_folder(folder: str | os.PathLike[str], repo_id: str, private: bool = True) -> str:
    """Uploads a folder as a model repository, which is created if there is none, and returns its URL.

    The token is that of the environment (HF_TOKEN) or of `hf auth login`. An interrupted upload resumes when it is
    called again: files that have arrived are not sent twice. A repository that exists stays private or public.

    Raises:
        ValueError: There is no such folder or no token, or the hub refuses the token, the name or the permission.
        RunError: The hub is unreachable, or the connection was lost.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    )

    folder = Path(folder)
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} contains no model: it has neither config.json nor adapter_config.json")
    if get_token() is None:
        raise ValueError("there is no token for the hub; set HF_TOKEN to one with write access, or run `hf auth login`")
    api = HfApi()
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=url.repo_id,
            folder_path=folder,
            commit_message=f"Upload {folder.name} with groupax",
            ignore_patterns=[MANIFEST, ".*.partial*", "*/.*.partial*"],
        )
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is not a valid repository name: {error}") from error
    except (HTTPError, ConnectionError, RuntimeError) as error:  # the client raises RuntimeError for failed uploads
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
            raise ValueError(
                f"the hub refuses the upload to {repo_id} (status {error.response.status_code}: "
                f"{error.server_message or 'no message'}); check that HF_TOKEN may write there"
            ) from error
        cause = error.__cause__ or error
        reason = getattr(error, "server_message", None) or f"{type(cause).__name__}: {cause}"
        raise RunError(
            f"the upload of {folder} to {repo_id} was interrupted ({reason}). Nothing is lost: the "
            "folder is unchanged, and the same command resumes the upload"
        ) from error
    return str(url)
