"""Checkpoints from the Hugging Face hub, and to it: the one place that touches the network."""

from pathlib import Path

from patchlight.weights.read import CheckpointError

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
OLD_WEIGHTS = ("pytorch_model.bin",)
BESIDE = ("config.json", "preprocessor_config.json", "processor_config.json")


def fetch(name: str, revision: str | None = None, *, configs_only: bool = False) -> Path:
    """The folder, in the hub's own cache, that holds the repository's config and, unless they are not wanted, weights.

    `revision` is a branch, tag or commit. With HF_HUB_OFFLINE=1, or without a network, only the cache is looked at.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"hf:{name}" + (f" at {revision}" if revision else "")
    try:
        if configs_only:
            return Path(snapshot_download(name, revision=revision, allow_patterns=[*BESIDE]))
        folder = Path(
            snapshot_download(name, revision=revision, allow_patterns=[*WEIGHTS, "model-*.safetensors", *BESIDE])
        )
        if not any((folder / weights).exists() for weights in WEIGHTS):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*OLD_WEIGHTS, *BESIDE]))
    except GatedRepoError:
        raise CheckpointError(
            f"{at}: its authors ask you to accept their terms; do so on its page, then `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{at}: the hub has no such revision") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{at}: the hub has no such repository, or it is private and needs `hf auth login`"
        ) from None
    except HFValidationError:
        raise CheckpointError(f"{at}: not a name on the hub; write hf:owner/name") from None
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"{at}: not in the cache, and the hub cannot be reached; load it once with a network, or give a folder"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{at}: the hub answered with an error ({reason})") from None
    return folder


def upload(folder: Path, name: str, *, private: bool = False) -> str:
    """Everything in the folder to the repository OWNER/NAME, in one commit; the repository's address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    if name.count("/") != 1:
        raise CheckpointError(f"{name}: not a name on the hub; write OWNER/NAME")
    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a model of Patchlight")
    except HFValidationError:
        raise CheckpointError(f"{name}: not a name on the hub; write OWNER/NAME") from None
    except LocalTokenNotFoundError:
        raise CheckpointError(f"{name}: the hub does not know you; `hf auth login` first") from None
    except Exception as error:  # the client's own kind for a network that is not there differs by its version
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            raise CheckpointError(
                f"{name}: the hub does not let you write there; `hf auth login` with a token that may write"
            ) from None
        raise CheckpointError(f"{name}: could not be uploaded ({' '.join(str(error).split())[:200]})") from None
    return str(address)
