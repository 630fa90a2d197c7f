"""Hostile input, made by the thousand: what a target makes of it is a right answer or a refusal, and nothing else.

    python tests/fuzz/fuzzing.py checkpoint --minutes 20 --found /tmp/found

`pip install atheris` lets coverage guide it; without, inputs are mutated at random from the targets' own seeds, and
those that lead to a new answer are mutated further. In the suite, test_fuzz.py does that with a fixed seed.
"""

import argparse
import contextlib
import json
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CPU_SECONDS = 5.0
"""More than this for a few kilobytes is a hang."""

MEGABYTES = 200
"""More than this on top of what the process had is greed."""


@dataclass(frozen=True)
class Target:
    """What is fed. A seed's first byte chooses what the rest of it is."""

    name: str
    seeds: Sequence[bytes]
    feed: Callable[[bytes], str]
    """Gives the answer, or the refusal, in words; raises whatever else comes of it."""
    is_json: Callable[[int], bool] = lambda kind: False
    """Whether inputs of this first byte are JSON, a value a line."""
    is_text: Callable[[int], bool] = lambda kind: False
    repair: Callable[[bytes], bytes] = bytes
    """Makes checksums right again, which would keep what was changed from being read at all."""
    words: Sequence[bytes] = ()
    """That stand in such files and mean something."""


class HangError(BaseException):
    """Nothing but a limit: the code under test must not catch it."""


class GreedError(BaseException):
    """The same of memory."""


@dataclass
class Findings:
    """What should not have happened: of each kind the first input and its traceback."""

    folder: Path | None = None
    kinds: dict[str, tuple[bytes, str]] = field(default_factory=dict)

    def note(self, content: bytes, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/patchlight/" in frame.filename]
        at = (ours or frames)[-1]
        kind = f"{type(error).__name__} {Path(at.filename).name}:{at.name}:{at.lineno}"
        if kind in self.kinds:
            return
        said = "".join(traceback.format_exception(error))
        self.kinds[kind] = content, said
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            stem = re.sub(r"[^\w.-]+", "-", kind)
            (self.folder / f"{stem}.bin").write_bytes(content)
            (self.folder / f"{stem}.txt").write_text(said, errors="replace")


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise HangError after a while of computing, and GreedError once memory has grown that is not the process's
    own."""

    def stop(number: int, frame: Any) -> None:
        raise HangError(f"{CPU_SECONDS} seconds of the processor")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    handler = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if grown > MEGABYTES:
        raise GreedError(f"{grown:.0f} MB")


def feed(target: Target, content: bytes, findings: Findings) -> str:
    try:
        with limited():
            return target.feed(content)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        findings.note(content, error)
        return type(error).__name__


# Mutation

_ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 65_536, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308),
    *(
        float("nan"),
        float("inf"),
        -float("inf"),
        "",
        "x",
        "1",
        "\0",
        "\n",
        "\ud800",
        "../../x",
        "/etc/passwd",
        "a" * 300,
    ),
    *([], [[]], [1, 2], ["x"], [0.5, 0.5, 0.5], {}, {"a": 1}, [None], [{}]),
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a value."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        keys: Any = each.keys() if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        for key in keys:
            found.append((each, key))
            waiting.append(each[key])
    return found


def _mutate_value(value: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _places(value)
        if not places or rng.random() < 0.02:
            return rng.choice(_ODD_VALUES)
        container, key = rng.choice(places)
        what = rng.randrange(8)
        if what == 0:
            del container[key]
        elif what == 1:  # what stands elsewhere
            other, at = rng.choice(places)
            with contextlib.suppress(LookupError):
                container[key] = json.loads(json.dumps(other[at]))
        elif what == 2 and isinstance(container, list):
            container.insert(key, container[key])
        elif what == 2:
            container[rng.choice(("x", "version", f"{key}_", ""))] = rng.choice(_ODD_VALUES)
        elif what == 3 and isinstance(container[key], int | float) and container[key] == container[key]:
            container[key] = rng.choice((-1, 2, 1000, 1e6, 1e300, 0.01)) * min(max(container[key], -1e200), 1e200)
        else:
            container[key] = rng.choice(_ODD_VALUES)
    return value


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    """One value a line, of which one is changed and stays JSON, mostly."""
    lines = content[1:].split(b"\n")
    at = rng.randrange(len(lines))
    if rng.random() < 0.03:
        lines[at] = b'{"path":' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    elif rng.random() < 0.05:
        lines.insert(at, lines[at])
    else:
        try:
            lines[at] = json.dumps(_mutate_value(json.loads(lines[at]), rng)).encode()
        except (ValueError, RecursionError):
            lines[at] = b"{}"
    return content[:1] + b"\n".join(lines)


_ODD_BYTES = (b"\xff" * 8, b"\0" * 8, b"\xff\xff", b"\0", b"\x80", b"\x7f", b"\xff\xff\xff\x7f", b"9" * 20, b"\n")


def mutate_bytes(content: bytes, rng: random.Random, words: Sequence[bytes] = ()) -> bytes:
    """Its first byte stays."""
    kind, content = content[:1], bytearray(content[1:])
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.choice((rng.randrange(len(content) + 1), rng.randrange(min(len(content), 64) + 1)))
        length = rng.choice((1, 1, 2, 4, 16, 64, 500))
        what = rng.randrange(7)
        other = rng.choice((*_ODD_BYTES, *words, *words, bytes(rng.randrange(256) for _ in range(rng.randrange(1, 5)))))
        if what == 0 and at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del content[at : at + length]
        elif what == 2:
            content[at:at] = other
        elif what == 3:
            content[at : at + len(other)] = other
        elif what == 4:
            content[at:at] = content[at : at + length] * rng.choice((1, 1, 2, 30))
        elif what == 5:
            start = rng.randrange(len(content) + 1)
            content[at:at] = content[start : start + length]
        elif rng.random() < 0.2:
            del content[at:]
    return kind + bytes(content[:1_000_000])


def mutate(target: Target, content: bytes, rng: random.Random) -> bytes:
    if content and target.is_json(content[0]) and rng.random() < 0.8:
        return mutate_json(content, rng)
    content = mutate_bytes(content, rng, target.words)
    if content and target.is_text(content[0]) and rng.random() < 0.9:
        return content[:1] + content[1:].decode("utf-8", "ignore").encode()
    return target.repair(content) if rng.random() < 0.9 else content


def by_chance(
    target: Target, findings: Findings, *, seed: int = 0, times: int | None = None, seconds: float = 1e9
) -> int:
    """Feed mutations until there were so many, or for so long; how many there were."""
    rng, end = random.Random(seed), time.monotonic() + seconds
    pool, answers, done = list(target.seeds), set[str](), 0
    while (times is None or done < times) and time.monotonic() < end:
        content = mutate(target, rng.choice(pool if rng.random() < 0.5 else target.seeds), rng)
        answer = re.sub(r"'.*?'|\".*?\"|[\d.]+", "0", feed(target, content, findings))[:60]
        done += 1
        if answer not in answers:
            answers.add(answer)
            if len(answers) < 5000 and len(content) < 20_000:
                pool.append(content)
    return done


def by_coverage(make_target: Callable[[], Target], findings: Findings, seconds: float, corpus: Path) -> None:
    """The same, guided by what runs in Patchlight, Pillow and the libraries that read for us; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["patchlight", "PIL", "tarfile", "zipfile", "csv", "pickletools"]):
        target = make_target()
    rng, done = random.Random(0), 0
    corpus.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(target.seeds):
        (corpus / f"seed-{number:03}").write_bytes(content)
        feed(target, content, Findings())  # what is imported at first use is no finding

    def mutated(content: bytes, most: int, seed: int) -> bytes:
        rng.seed(seed)
        if rng.random() < 0.5:
            return target.repair(bytes(atheris.Mutate(content, most)))[:most]
        return mutate(target, content, rng)[:most]

    def one(content: bytes) -> None:
        nonlocal done
        done += 1
        feed(target, content, findings)
        if done % 1000 == 0:
            sys.stderr.write(f"{target.name}: {done:,} executions, {len(findings.kinds)} findings\n")

    limits = [
        f"-max_total_time={round(seconds)}",
        "-timeout=60",
        "-rss_limit_mb=6000",
        "-max_len=40000",
        "-verbosity=1",
    ]
    atheris.Setup(
        [sys.argv[0], *limits, f"-artifact_prefix={corpus.parent}/", str(corpus)], one, custom_mutator=mutated
    )
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--found", type=Path, default=Path("/tmp/patchlight-fuzz"))
    parser.add_argument("--by-chance", action="store_true", help="without atheris")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    findings = Findings(given.found / given.target)

    def make_target() -> Target:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from hostile_inputs import make

        return make(given.target)

    with contextlib.suppress(ImportError):
        import atheris  # noqa: F401

        if not given.by_chance:
            by_coverage(make_target, findings, 60 * given.minutes, given.found / f"{given.target}-corpus")
            return
    done = by_chance(make_target(), findings, seed=given.seed, seconds=60 * given.minutes)
    sys.stderr.write(f"{given.target}: {done:,} executions, findings: {sorted(findings.kinds)}\n")


if __name__ == "__main__":
    main()
