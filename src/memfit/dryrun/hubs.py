"""Hubs that models are uploaded to: an upload does nothing, and the script is told that it worked.

What would be uploaded holds made-up values. Reading goes on as without a network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from memfit.dryrun.native_writers import after_import

UPLOADS = "nothing was uploaded to the Hugging Face hub"
"""Told once of a script that would have uploaded something."""

_COMMITS = ("create_commit", "upload_file", "upload_folder", "delete_file", "delete_folder")
_OTHERS = (
    "delete_repo", "create_branch", "create_tag", "delete_branch", "delete_tag", "move_repo",
    "super_squash_history", "update_repo_settings", "upload_large_folder", "create_collection",
)  # fmt: skip


def stop_uploads(note: Callable[[str], None]) -> None:
    """Let nothing of this process's be uploaded; ``note`` is told when something would have been."""
    after_import({"huggingface_hub.hf_api": functools.partial(_stop, note)})


def _stop(note: Callable[[str], None], module: Any) -> None:
    def address(named: Mapping[str, Any], args: tuple[Any, ...]) -> str:
        repository = str(named.get("repo_id") or (args[0] if args and isinstance(args[0], str) else "model"))
        owned = repository if "/" in repository else f"user/{repository}"
        return f"https://huggingface.co/{owned}"

    def create_repo(_api: Any, *args: Any, **named: Any) -> Any:
        note(UPLOADS)
        return module.RepoUrl(address(named, args))

    def commit(_api: Any, *args: Any, run_as_future: bool = False, **named: Any) -> Any:
        note(UPLOADS)
        made = module.CommitInfo(
            commit_url=f"{address(named, ())}/commit/{'0' * 40}",
            commit_message=str(named.get("commit_message", "")),
            commit_description="",
            oid="0" * 40,
        )
        if not run_as_future:
            return made
        done: Future[Any] = Future()
        done.set_result(made)
        return done

    def nothing(_api: Any, *args: Any, **named: Any) -> None:
        note(UPLOADS)

    answers = {"create_repo": create_repo} | dict.fromkeys(_COMMITS, commit) | dict.fromkeys(_OTHERS, nothing)
    for name, answer in answers.items():
        original = getattr(module.HfApi, name, None)
        if original is None:
            continue
        setattr(module.HfApi, name, functools.wraps(original)(answer))
        if hasattr(module, name):  # the functions of the module are those of one instance
            setattr(
                module, name, functools.partial(getattr(module.HfApi, name), getattr(module, "api", None))
            )
