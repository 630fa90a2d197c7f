"""Long life: the server under mixed and hostile load for minutes, and one crop run over very many photos.

    python benchmarks/soak.py serve --minutes 30
    python benchmarks/soak.py crop --photos 100000

serve    Clients over loopback send, look, crop and remove photos and ask for predictions; five in a hundred requests
         are hostile: garbage, bombs, bodies that end early or never come, wrong tokens, paths without sense.
         Each minute: requests, statuses, p50 and p99 of those that were answered rightly, memory, threads and open
         files of the server. It fails where a status is 500, an answer is wrong, or threads, files or temporary files
         are left.
crop     Tiny photos, each another one, by a tiny model. At each tenth: rows, seconds, memory. Then the sizes of
         journal, tables and report, and the same command once more, which has nothing to do.
"""

import argparse
import contextlib
import http.client
import io
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image
from serve import Client, contents, memory
from signals import make_place

START = [sys.executable, "-m", "patchlight"]

HOSTILE = 0.05

SETTLED = 15
"""Seconds after the load until connections that are kept open have been closed."""


# The server


@dataclass
class Load:
    client: Client
    photos: list[bytes]
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    statuses: Counter[str] = field(default_factory=Counter)
    took: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    decisions: dict[int, str] = field(default_factory=dict)
    """Of each photo; every later answer has to be the first one."""

    def ask(
        self, method: str, path: str, body: bytes | None = None, kind: str = "", **headers: str
    ) -> tuple[int, bytes]:
        began = time.perf_counter()
        headers = {"x-patchlight-token": self.client.token} | ({"Content-Type": kind} if kind else {}) | headers
        connection = http.client.HTTPConnection("127.0.0.1", self.client.port, timeout=150)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        with self.lock:
            self.statuses[f"{answer.status // 100}xx" if answer.status not in (500, 503) else str(answer.status)] += 1
            if answer.status < 300:
                self.took.append(time.perf_counter() - began)
        if answer.status == 500:
            self.wrong.append(f"{method} {path}: 500 {content[:200]!r}")
        if answer.status == 503:
            time.sleep(float(answer.headers["Retry-After"]))
        return answer.status, content

    def work(self, seed: int) -> None:
        draws = random.Random(seed)
        while not self.over.is_set():
            try:
                hostile(self, draws) if draws.random() < HOSTILE else self.usual(draws)
            except (OSError, http.client.HTTPException) as error:
                with self.lock:
                    self.statuses[type(error).__name__] += 1

    def usual(self, draws: random.Random) -> None:
        """One photo: sent, looked at in some ways, and mostly removed again."""
        number = draws.randrange(len(self.photos))
        status, said = self.ask("POST", "/api/v1/photos", *form(self.photos[number]))
        if status != 201:
            return
        place = f"/api/v1/photos/{json.loads(said)['id']}"
        for what in draws.sample(("localize", "attention?layer=-1&patch=0", "classify", "region?layer=-1&patch=0"), 2):
            status, said = self.ask("GET", f"{place}/{what}")
            if what == "localize" and status == 200:
                decision = json.dumps(json.loads(said)["subjects"])
                if self.decisions.setdefault(number, decision) != decision:
                    self.wrong.append(f"photo {number}: {decision}, and {self.decisions[number]} before")
        if draws.random() < 0.2:
            self.ask("POST", "/api/v1/predict", *form(self.photos[number]))
        if draws.random() < 0.9:
            self.ask("DELETE", place)


def form(content: bytes) -> tuple[bytes, str]:
    head = b'--x\r\nContent-Disposition: form-data; name="photo"; filename="x"\r\n\r\n'
    return head + content + b"\r\n--x--\r\n", "multipart/form-data; boundary=x"


def hostile(load: Load, draws: random.Random) -> None:
    draws.choice(ATTACKS)(load, draws)


def _garbage(load: Load, draws: random.Random) -> None:
    load.ask("POST", "/api/v1/photos", *form(draws.randbytes(draws.randrange(5000))))


def _damaged(load: Load, draws: random.Random) -> None:
    content = bytearray(draws.choice(load.photos))
    for _ in range(20):
        content[draws.randrange(len(content))] = draws.randrange(256)
    load.ask("POST", "/api/v1/photos", *form(bytes(content[: draws.randrange(len(content))])))


def _bomb(load: Load, draws: random.Random) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    png = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(100_000)))
        + chunk(b"IEND", b"")
    )
    load.ask("POST", "/api/v1/photos", *form(png))


def _no_form(load: Load, draws: random.Random) -> None:
    load.ask("POST", "/api/v1/photos", draws.randbytes(300), "multipart/form-data; boundary=y")


def _nonsense(load: Load, draws: random.Random) -> None:
    place = draws.choice(
        ("photos/../../etc/passwd", "photos/x/localize", "photos/%00", "models/none/positions", "q" * 9000)
    )
    load.ask("GET", f"/api/v1/{place}?layer={draws.choice(('-99', '1e400', 'x', '%ff'))}")


def _wrong_token(load: Load, draws: random.Random) -> None:
    load.ask("POST", "/api/v1/photos", b"x", "text/plain", **{"x-patchlight-token": "wrong"})


def _wrong_json(load: Load, draws: random.Random) -> None:
    body = draws.choice(
        (b"{", b"[]", b'{"inputs": 5}', b'{"inputs":[{"name":"x","shape":[-1],"datatype":"FP32","data":[]}]}')
    )
    load.ask("POST", "/v2/models/default/infer", body, "application/json")


def _bare(load: Load, draws: random.Random) -> None:
    """Bytes that are no whole request, on a connection that is closed in their midst or left open for a while."""
    first = b"POST /api/v1/photos HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % load.client.port
    said = draws.choice(
        (
            first + b"Content-Length: 99999999999999\r\n\r\nabc",
            first + b"Content-Length: 500\r\n\r\nabc",
            first + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\nabc",
            first,
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            draws.randbytes(200),
            b"",
        )
    )
    with socket.create_connection(("127.0.0.1", load.client.port), timeout=20) as connection:
        connection.sendall(said)
        time.sleep(draws.choice((0, 0, 0.2, 2)))
    with load.lock:
        load.statuses["cut"] += 1


ATTACKS: tuple[Callable[[Load, random.Random], None], ...] = (
    *(_garbage, _damaged, _bomb, _no_form, _nonsense, _wrong_token, _wrong_json),
    *(_bare, _bare, _bare),
)


def held(process: int) -> tuple[float, int, int]:
    """MiB, threads and open files of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    threads = int(re.search(r"Threads:\s+(\d+)", status)[1])  # type: ignore[index]
    return memory(process), threads, len(os.listdir(f"/proc/{process}/fd"))


def soak_server(minutes: float, clients: int, model: str, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = Path(temporary)
        (folder / "tmp").mkdir()
        environment = os.environ | {"TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
        if model == "tiny":
            make_place(folder / "place", "")
            model = str(folder / "place" / "model")
        command = [*START, "serve", "--port", "0", "--no-open", "--model", model]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2].strip(" /\n"))
            client = Client(port, process.stdout.readline().split()[-1])
            while not client.ask("GET", "/api/v1/models")["ready"]:
                time.sleep(0.2)
            load = Load(client, contents(24))
            _warm(load, clients)
            time.sleep(SETTLED)
            before = held(process.pid)
            print(f"before: {before[0]:,.0f} MiB, {before[1]} threads, {before[2]} files", flush=True)
            load.statuses.clear()
            threads = [threading.Thread(target=load.work, args=(seed + number,)) for number in range(clients)]
            for thread in threads:
                thread.start()
            sizes = []
            for minute in range(1, max(1, round(minutes)) + 1):
                time.sleep(60 * minutes / max(1, round(minutes)))
                with load.lock:
                    took, load.took = sorted(load.took), []
                    statuses, load.statuses = load.statuses, Counter()
                now = held(process.pid)
                sizes.append(now[0])
                p50, p99 = (1000 * took[min(len(took) - 1, int(at * len(took)))] if took else 0 for at in (0.5, 0.99))
                told = ", ".join(f"{name} {count:,}" for name, count in sorted(statuses.items()))
                print(
                    f"minute {minute}: {sum(statuses.values()):,} requests ({told}), p50 {p50:,.0f} ms, p99 {p99:,.0f} "
                    f"ms, {now[0]:,.0f} MiB, {now[1]} threads, {now[2]} files",
                    flush=True,
                )
            load.over.set()
            for thread in threads:
                thread.join()
            time.sleep(SETTLED)
            after = held(process.pid)
            print(f"after: {after[0]:,.0f} MiB, {after[1]} threads, {after[2]} files")
            half = len(sizes) // 2
            if half:
                growth = statistics.mean(sizes[half:]) - statistics.mean(sizes[:half])
                print(f"memory: second half of the time {growth:+,.0f} MiB beside the first")
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        left = [
            name for name in os.listdir(folder / "tmp") if not name.startswith("torchinductor")
        ]  # a cache of torch's
        said = (folder / "log").read_text(errors="replace").strip()
        bad = [*load.wrong[:10]]
        bad += [f"{after[1] - before[1]} threads left"] if after[1] > before[1] else []
        bad += [f"{after[2] - before[2]} files left open"] if after[2] > before[2] else []
        bad += [f"left in the folder of temporary files: {left}"] if left else []
        bad += [f"exit code {code}"] if code not in (0, 143) else []
        bad += [f"said: {said[-500:]}"] if "Traceback" in said else []
    print("\n".join(bad) or "no answer wrong, nothing left")
    return int(bool(bad))


def _warm(load: Load, clients: int) -> None:
    """Every kind of request, by all at once, so that what is made at the first of them is there."""

    def all_of_it(seed: int) -> None:
        draws = random.Random(seed)
        for _ in range(6):
            load.usual(draws)
        for attack in ATTACKS:
            with contextlib.suppress(OSError, http.client.HTTPException):
                attack(load, draws)

    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(all_of_it, range(clients)))


# The run


def make_photos(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for number in range(count):
        if number % 1000 == 0:
            (folder / f"{number // 1000:03}").mkdir()
        level_HWC = random.integers(0, 120, (3, 4, 3), np.uint8)
        image = Image.fromarray(level_HWC).resize((64, 48), Image.Resampling.BILINEAR)
        x, y = (int(random.integers(0, side // 2)) for side in image.size)
        image.paste((250, 240, 200), (x, y, x + 24, y + 18))
        file = io.BytesIO()
        image.save(file, "JPEG")
        (folder / f"{number // 1000:03}" / f"{number:06}.jpg").write_bytes(file.getvalue())


def soak_crop(count: int, workers: int) -> int:
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = Path(temporary) / "place"
        make_place(folder, "")
        make_photos(folder / "many", count)
        words = ["crop", "many", "--out", "out", "--model", "model", "--workers", str(workers)]
        for _ in range(2):
            start, most = time.monotonic(), 0.0
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen([*START, *words], cwd=folder, stdout=log, stderr=log)
            journal, place, rows, told = folder / "out/.run/journal.jsonl", 0, 0, 0
            while process.poll() is None:
                time.sleep(0.5)
                try:
                    now = memory(process.pid)
                except (OSError, TypeError):
                    continue
                most = max(most, now)
                if journal.exists():
                    with journal.open("rb") as file:
                        file.seek(place)
                        added = file.read()
                    place, rows = place + len(added), rows + added.count(b"\n")
                if rows * 10 // count > told:
                    told = rows * 10 // count
                    print(f"{rows:8,} rows after {time.monotonic() - start:6,.0f} s: {now:,.0f} MiB", flush=True)
            said = (folder / "log").read_text(errors="replace")
            print(f"exit code {process.returncode} after {time.monotonic() - start:,.0f} s, at most {most:,.0f} MiB")
            print("  " + "\n  ".join(said.strip().splitlines()[-3:]), flush=True)
            if process.returncode:
                return 1
        for name in (".run/journal.jsonl", "results.jsonl", "results.csv", "summary.json", "report.html"):
            print(f"{name}: {(folder / 'out' / name).stat().st_size / 1e6:,.1f} MB")
        for name in ("crops", "thumbs"):
            sizes = [each.stat().st_size for each in (folder / "out" / name).rglob("*") if each.is_file()]
            print(f"{name}: {len(sizes):,} files, {sum(sizes) / 1e6:,.1f} MB")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    served = ways.add_parser("serve")
    served.add_argument("--minutes", type=float, default=30)
    served.add_argument("--clients", type=int, default=4)
    served.add_argument("--model", default="default", help="or tiny, which makes more requests of the same time")
    served.add_argument("--seed", type=int, default=0)
    cropped = ways.add_parser("crop")
    cropped.add_argument("--photos", type=int, default=100_000)
    cropped.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    if given.way == "serve":
        sys.exit(soak_server(given.minutes, given.clients, given.model, given.seed))
    sys.exit(soak_crop(given.photos, given.workers))


if __name__ == "__main__":
    main()
