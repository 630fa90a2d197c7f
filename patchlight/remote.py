"""Photos that lie elsewhere: s3://, gs://, az://, hf:// and http(s)://, by fsspec and the library for each.

Credentials, endpoints and the like come from where those libraries take them (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL,
GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, ...), and from fsspec's own variables (FSSPEC_S3_ANON=true).
What fails for a moment is tried again, a little later each time.
"""

import functools
import hashlib
import importlib
import os
import posixpath
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urljoin, urlsplit

from patchlight.errors import PatchlightError
from patchlight.files import printable

T = TypeVar("T")

_LIBRARIES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}

_CREDENTIALS = {
    "s3fs": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for a public bucket",
    "gcsfs": "GOOGLE_APPLICATION_CREDENTIALS, or FSSPEC_GS_TOKEN=anon for a public bucket",
    "adlfs": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "huggingface_hub": "HF_TOKEN",
    "aiohttp": "the address",
}

TRIES = 5
"""Of what may work a little later."""

WAIT = 0.5
"""Seconds before the second try; twice as long before each further one, and up to a half more at random."""

CONNECT_SECONDS, READ_SECONDS = 10, 60
"""Without any answer, until a try counts as failed."""

_MAGIC = re.compile(r"[*?\[]")

Stamp = tuple[int, int]
"""(bytes, nanoseconds of the last change, or a number by which the content is known)."""


class Unreachable(Exception):  # noqa: N818
    """What lies elsewhere cannot be read: `missing`, it is not there at all; `momentary`, it may be again."""

    def __init__(self, detail: str, *, missing: bool = False, momentary: bool = False) -> None:
        super().__init__(detail)
        self.detail, self.missing, self.momentary = detail, missing, momentary


def scheme_of(path: str) -> str | None:
    """What stands before "://"."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", path)
    return found[1].lower() if found else None


def is_remote(path: object) -> bool:
    return isinstance(path, str) and scheme_of(path) is not None


def as_given(path: str | os.PathLike[str]) -> str:
    """The text of a path; a Path, which takes a slash away from a URL, has it put back."""
    text = os.fspath(path)
    scheme, _, rest = text.partition(":/")
    lost = not isinstance(path, str) and scheme in _LIBRARIES and rest and not rest.startswith("/")
    return f"{scheme}://{rest}" if lost else text


def on_disk(path: str | os.PathLike[str]) -> Path:
    """A path of this machine, for all but photos, which are read from elsewhere, too; refuses a URL."""
    given = as_given(path)
    if is_remote(given):
        raise PatchlightError(
            f"{given}: has to be on a disk of this machine; name a local place, and copy it from or to there"
        )
    return Path(path)


def as_path(url: str) -> str:
    """A URL written like an absolute path, of which folders can be taken: /s3/bucket/a.jpg."""
    scheme, _, rest = url.partition("://")
    return f"/{scheme.lower()}/{below_folders(rest.strip('/'))}"


def below_folders(names: str) -> str:
    """Names that are no files of the system, as a path that leads down alone and that a file system takes: a bucket's
    key or a shard may say "../../x.jpg", and what is made of it must stay where it belongs."""
    *folders, last = names.replace("\0", "_").split("/")
    safe = [name if len(os.fsencode(name)) <= 200 else f"{_number(name):x}" for name in folders]
    return "/".join("_" if name in ("", ".", "..") else name for name in (*safe, last))


def name_in(url: str) -> str:
    """Without what may follow a name on the web: "?size=large"."""
    return urlsplit(url).path if scheme_of(url) in ("http", "https") else url


@functools.cache
def _system(scheme: str) -> Any:
    """fsspec's file system of a scheme; raises PatchlightError where there is none."""
    library = _LIBRARIES.get(scheme)
    if library is None:
        raise PatchlightError(f"{scheme}:// is not supported; use {', '.join(_LIBRARIES)}:// or a path")
    try:
        importlib.import_module(library)
    except ModuleNotFoundError:
        raise PatchlightError(f"{scheme}:// needs {library}; pip install 'patchlight[remote]'") from None
    import fsspec

    more: dict[str, Any] = {"use_listings_cache": False}
    if library == "s3fs":
        waits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS}
        more["config_kwargs"] = waits | {"retries": {"max_attempts": 1}}  # it is tried again here
    if library == "aiohttp":
        timeout = importlib.import_module("aiohttp").ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS
        )
        more["client_kwargs"] = {"timeout": timeout}
    system = fsspec.filesystem(scheme, **more)
    if library == "s3fs":
        system.retries = 1
    return system


def _inside(url: str) -> str:
    """As fsspec names it."""
    return url if scheme_of(url) in ("http", "https") else url.partition("://")[2]


_SAID = (FileNotFoundError, PermissionError, PatchlightError, Unreachable, LookupError, ValueError)
"""Errors that say what is wrong, and that no further try helps."""

_EXPIRED = re.compile(r"Expired ?Token|RequestExpired|token[^.]{0,20} (has )?expired", re.IGNORECASE)
"""Of credentials that were good before, and will be again: a photo that they cannot read is not lost."""


def tried(call: Callable[[], T]) -> T:
    """What a call gives, tried again where that may help; raises Unreachable, PermissionError or FileNotFoundError."""
    for left in reversed(range(TRIES)):
        try:
            return call()
        except Exception as error:  # each library has errors of its own
            cause = error.__cause__
            if _EXPIRED.search(f"{type(error).__name__} {error} {cause}") and not isinstance(error, PatchlightError):
                raise Unreachable(f"{_line(error)}; renew the credentials", momentary=True) from None
            if isinstance(error, FileNotFoundError) and (isinstance(cause, OSError) or _status(cause) not in _GONE):
                assert isinstance(cause, Exception)
                error = cause  # fsspec's HTTP says of a server that refuses or cannot be reached that there is no file
            elif _status(error) in _GONE[1:]:
                raise FileNotFoundError from None
            elif isinstance(error, _SAID):
                raise
            if _is_final(error):
                raise PermissionError(_line(error)) from None
            if not left:
                raise Unreachable(f"{_line(error)}, after {TRIES} tries", momentary=True) from None
            pause = WAIT * 2 ** (TRIES - 1 - left)
        time.sleep(pause * random.uniform(1, 1.5))
    raise AssertionError


def _is_final(error: Exception) -> bool:
    """Of credentials that are missing or wrong: no later try would do better."""
    kind, text = type(error).__name__, str(error)
    if kind in ("NoCredentialsError", "PartialCredentialsError", "ClientAuthenticationError", "GatedRepoError"):
        return True
    codes = r"InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|Forbidden|Unauthorized|\b40[13]\b"
    return _status(error) in (401, 403) or bool(re.search(codes, text))


_GONE = (None, 404, 410)


def _status(error: BaseException | None) -> int | None:
    """What an HTTP server answered."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _line(error: Exception) -> str:
    if _status(error) is not None and hasattr(error, "message"):
        return f"{_status(error)} {error.message}"
    text = " ".join(str(error).split())[:160].rstrip(".")
    return text or type(error).__name__


def beside(url: str, name: str) -> str:
    """What a file at a URL names: a URL, or a file below its folder."""
    if is_remote(name):
        return name
    base = url.rpartition("/")[0] + "/"
    if scheme_of(base) in ("http", "https"):
        return urljoin(base, name)
    if {".", ".."} & set(name.split("/")):
        scheme, _, inside = base.partition("://")
        return f"{scheme}://{posixpath.normpath(inside + name)}"
    return base + name  # a bucket's keys may have two slashes in a row


def fetch(url: str, start: int | None = None, end: int | None = None) -> bytes:
    """The whole content, or a part of it; raises `Unreachable`."""
    try:
        scheme = scheme_of(url)
        assert scheme is not None
        system = _system(scheme)
        return bytes(tried(lambda: system.cat_file(_inside(url), start=start, end=end)))
    except FileNotFoundError:
        raise Unreachable("there is no such file", missing=True) from None
    except PermissionError as error:
        raise Unreachable(f"no permission to read it ({_line(error)})") from None


def opened(url: str) -> IO[bytes]:
    """To be read here and there, such as the shards and tables of many photos."""
    scheme = scheme_of(url)
    assert scheme is not None
    try:
        file: IO[bytes] = tried(lambda: _system(scheme).open(_inside(url), "rb", block_size=2**22))
        return file
    except FileNotFoundError:
        raise Unreachable("there is no such file", missing=True) from None
    except PermissionError as error:
        raise Unreachable(f"no permission to read it ({_line(error)})") from None


def stamp(url: str) -> Stamp | None:
    """By which a changed content is known; None where there is none, or it cannot be asked for."""
    scheme = scheme_of(url)
    assert scheme is not None
    try:
        return _stamp_in(tried(lambda: _system(scheme).info(_inside(url))))
    except (FileNotFoundError, PermissionError, Unreachable):
        return None


def _stamp_in(about: dict[str, Any]) -> Stamp:
    size = int(about.get("size") or 0)
    changed: Any = next(
        (about[key] for key in ("LastModified", "last_modified", "mtime", "updated") if about.get(key)), None
    )
    if isinstance(changed, str):
        try:
            changed = datetime.fromisoformat(changed)
        except ValueError:
            return size, _number(changed)
    if isinstance(changed, datetime):
        return size, int(changed.timestamp()) * 1_000_000_000
    if isinstance(changed, int | float):
        return size, int(changed * 1e9)
    known = next((str(about[key]) for key in ("ETag", "etag", "blob_id", "md5Hash") if about.get(key)), "")
    return size, _number(known)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


# What is there


@dataclass(frozen=True, slots=True)
class Listing:
    """What a URL stands for."""

    root: str
    """The folder that all of it lies in, see `as_path`."""
    files: list[tuple[str, Stamp | None]]
    """URLs by name, and what they are known by, where that came with their names."""
    by_name: bool = False
    """Whether it was the name of one file."""


def listed(url: str) -> Listing:
    """The files behind a file's URL, a folder, a pattern, or a list (a text file of URLs, a line each, that ends in
    .txt); raises PatchlightError, in a line with the remedy."""
    scheme = scheme_of(url)
    assert scheme is not None
    system, shown = _system(scheme), printable(url)
    try:
        return tried(lambda: _listed(system, scheme, url))
    except FileNotFoundError:
        what = "page or file" if _LIBRARIES[scheme] == "aiohttp" else "bucket, folder or file"
        raise PatchlightError(f"{shown}: there is no such {what}; correct it or leave it out") from None
    except PermissionError as error:
        remedy = _CREDENTIALS[_LIBRARIES[scheme]]
        raise PatchlightError(f"{shown}: may not be read ({_line(error)}); check {remedy}") from None
    except Unreachable as error:
        raise PatchlightError(
            f"{shown}: cannot be reached ({error.detail}); check the address and the network"
        ) from None


def _listed(system: Any, scheme: str, url: str) -> Listing:
    if urlsplit(url).path.lower().endswith(".txt"):
        return _list_file(system, url)
    if scheme in ("http", "https"):
        return Listing(as_path(url.rpartition("/")[0]), [(url, _stamp_in(system.info(url)))], by_name=True)
    inside = _inside(url)
    if _MAGIC.search(inside):
        found = system.glob(inside, detail=True)
        root = _MAGIC.split(inside)[0].rpartition("/")[0]
        return Listing(as_path(f"{scheme}://{root}"), list(_files(scheme, found)))
    bucket, _, key = inside.strip("/").partition("/")
    if key:
        try:
            about = system.info(inside)
        except FileNotFoundError:
            system.ls(bucket, detail=False)  # says so, where there is no such bucket either
            raise
        if about.get("type") == "file":
            return Listing(as_path(f"{scheme}://{inside.rpartition('/')[0]}"), [(url, _stamp_in(about))], by_name=True)
    else:
        system.ls(bucket, detail=False)
    return Listing(as_path(url), list(_files(scheme, system.find(inside, detail=True))))


def _files(scheme: str, found: dict[str, Any]) -> Iterator[tuple[str, Stamp | None]]:
    for name in sorted(found, key=os.fsencode):
        if found[name].get("type") == "file":
            yield f"{scheme}://{name}", _stamp_in(found[name])


def _list_file(system: Any, url: str) -> Listing:
    text = bytes(system.cat_file(_inside(url))).decode("utf-8", "replace")
    lines = (line.strip() for line in text.splitlines())
    files = [beside(url, line) for line in lines if line and not line.startswith("#")]
    if not files:
        raise PatchlightError(f"{printable(url)}: is an empty list; write a URL on each line")
    for file in files:
        _system(scheme_of(file) or "")
    return Listing(os.path.commonpath([as_path(file.rpartition("/")[0]) for file in files]), [(f, None) for f in files])
