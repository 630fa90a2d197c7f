"""The server under load, on this machine: right answers, none lost, how long they take, and its memory.

    python benchmarks/serve.py                       # about 3 minutes on two cores, bounded in count and time
    python benchmarks/serve.py --photos 60 --rounds 2
    python benchmarks/serve.py --beside PYTHON       # beside LitServe, run by a Python that has it and Patchlight

It starts `patchlight serve` and speaks to it over loopback alone. First one client, one photo at a time; then, in
rounds, three times as many clients at once as the server takes (its queue and a batch). Each asks for the subject of a
photo of its own and comes again when it is told to (503 with Retry-After). Every answer is compared with
`patchlight.localize` in this process, number by number.

With --beside: `patchlight serve --workers 2` and LitServe with two workers (`litserve_app.py`), the same model, the
same photos in the same forms, one after the other in rounds. The capacity is what LitServe answers when enough clients
wait. Requests then come at even times, as many a second as the capacity and three times as many; each is timed from
when it was due to its right answer, the times that it was told to come again included. The seconds of the cores that
each server took are printed, too: they hang least on what else the machine does.
"""

import argparse
import contextlib
import http.client
import io
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import patchlight as pl
from patchlight.serve.limits import Limits

DEMO = Path(__file__).parents[1] / "demo"


@dataclass
class Client:
    port: int
    token: str
    refused: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "", until: float = 0.0) -> Any:
        """The answer's JSON, however often we are told to come again; None where the time is over."""
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            headers = {"x-patchlight-token": self.token} | ({"Content-Type": kind} if kind else {})
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            if answer.status in (200, 201):
                return json.loads(content)
            if answer.status == 204:
                return {}
            if answer.status != 503 or time.monotonic() > until:
                print(f"{method} {path}: {answer.status} {content[:200]!r}", file=sys.stderr)
                return None
            with self.lock:
                self.refused += 1
            time.sleep(float(answer.headers["Retry-After"]))

    def send(self, content: bytes) -> str:
        body = b'--x\r\nContent-Disposition: form-data; name="photo"; filename="x"\r\n\r\n' + content + b"\r\n--x--\r\n"
        found = self.ask("POST", "/api/v1/photos", body, "multipart/form-data; boundary=x", time.monotonic() + 60)
        return str(found["id"])


def contents(count: int) -> list[bytes]:
    """Demo photos, turned and scaled, so that no two are the same."""
    made, rng = [], np.random.default_rng(0)
    paths = sorted(path for path in DEMO.iterdir() if path.suffix in (".jpg", ".png"))
    for number in range(count):
        with Image.open(paths[number % len(paths)]) as image:
            image.draft("RGB", (800, 800))
            width = int(rng.integers(300, 700))
            small = image.convert("RGB").resize((width, int(width * rng.uniform(0.6, 1.5))))
        file = io.BytesIO()
        small.rotate(90 * int(rng.integers(0, 4)), expand=True).save(file, "JPEG", quality=90)
        made.append(file.getvalue())
    return made


def is_equal(answer: Any, found: pl.Localization) -> bool:
    boxes = [[each.box.left, each.box.top, each.box.right, each.box.bottom] for each in found.subjects]
    return bool(
        answer["decision"] == found.decision
        and answer["confidence"] == found.confidence
        and [subject["box"] for subject in answer["subjects"]] == boxes
        and [subject["confidence"] for subject in answer["subjects"]] == [each.confidence for each in found.subjects]
        and answer["named"]["label"] == (found.named and found.named.label)
        and answer["heat"]["values"] == found.heat_hw.flatten().tolist()
    )


def memory(process: int) -> float:
    """MiB that a process holds."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def show(name: str, seconds: list[float]) -> None:
    ordered = sorted(1000 * each for each in seconds)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99)]
    print(f"{name}: p50 {at[0]:,.0f} ms, p99 {at[1]:,.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    limits = Limits()
    parser.add_argument("--photos", type=int, default=3 * (limits.queue + limits.batch), help="clients at once")
    parser.add_argument("--different", type=int, default=24, help="photos that differ")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which a client gives up")
    parser.add_argument("--beside", metavar="PYTHON", help="compare with LitServe, run by this Python")
    parser.add_argument("--load-seconds", type=float, default=6.0, help="of each load beside LitServe")
    given = parser.parse_args()
    if given.beside:
        beside(given)
        return

    photos = contents(given.different)
    loaded = pl.load("default")
    wanted = [pl.localize(photo, loaded) for photo in photos]
    process = subprocess.Popen(
        [sys.executable, "-m", "patchlight", "serve", "--port", "0", "--no-open"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2].strip(" /\n"))
        client = Client(port, process.stdout.readline().split()[-1])
        while not client.ask("GET", "/api/v1/models")["ready"]:
            time.sleep(0.1)
        bad = run(client, process.pid, photos, wanted, given)
    finally:
        process.terminate()
        process.wait(30)
    sys.exit(bad)


def run(client: Client, server: int, photos: list[bytes], wanted: list[pl.Localization], given: Any) -> int:
    wrong = lost = 0
    sent, found = [], []
    for content, right in zip(photos, wanted, strict=True):
        start = time.perf_counter()
        photo = client.send(content)
        sent.append(time.perf_counter() - start)
        answer = client.ask("GET", f"/api/v1/photos/{photo}/localize")
        found.append(time.perf_counter() - start)
        wrong += not is_equal(answer, right)
        client.ask("DELETE", f"/api/v1/photos/{photo}")
    show("one at a time, sending", sent)
    show("one at a time, sending and finding", found)
    held = [memory(server)]
    for number in range(1, given.rounds + 1):
        ids = [client.send(photos[i % len(photos)]) for i in range(given.photos)]
        answers: list[Any] = [None] * len(ids)
        took = [0.0] * len(ids)
        alive: list[float] = []
        over, client.refused, start = threading.Event(), 0, time.perf_counter()
        until = time.monotonic() + given.seconds

        def ask(
            place: int, ids: list[str] = ids, answers: Any = answers, took: Any = took, until: float = until
        ) -> None:
            begun = time.perf_counter()
            answers[place] = client.ask("GET", f"/api/v1/photos/{ids[place]}/localize", until=until)
            took[place] = time.perf_counter() - begun

        def check_alive(over: threading.Event = over, alive: list[float] = alive) -> None:
            while not over.wait(0.25):
                begun = time.perf_counter()
                client.ask("GET", "/livez")
                alive.append(time.perf_counter() - begun)

        threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(ids))]
        watching = threading.Thread(target=check_alive)
        for thread in (watching, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        over.set()
        watching.join()
        right = [wanted[i % len(wanted)] for i in range(len(ids))]
        lost += sum(answer is None for answer in answers)
        wrong += sum(
            answer is not None and not is_equal(answer, each) for answer, each in zip(answers, right, strict=True)
        )
        held.append(memory(server))
        print(
            f"round {number}: {len(ids)} clients at once, {client.refused} times told to come again, "
            f"{len(ids) / seconds:.1f} photos/s, server {held[-1]:,.0f} MiB"
        )
        show("  until answered", took)
        show("  /livez meanwhile", alive or [0.0])
    growth = held[-1] - statistics.median(held[2:] or held)
    print(f"{lost} lost, {wrong} that differ from patchlight.localize; memory after round 2 grew by {growth:,.0f} MiB")
    return int(bool(lost or wrong))


FORM = b'--x\r\nContent-Disposition: form-data; name="photo"; filename="x"\r\n\r\n%b\r\n--x--\r\n'


@dataclass
class Predictor:
    """A server that answers one photo with its boxes, in one request."""

    name: str
    port: int
    path: str
    token: str = ""
    session: int = 0
    """Of its processes."""
    refused: int = 0
    failed: int = 0

    def processes(self) -> dict[Path, list[str]]:
        """Its processes' folders below /proc, and what `stat` says of each after the name."""
        found = {}
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                fields = file.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.session:
                    found[file.parent] = fields
        return found

    def cores(self) -> float:
        """Seconds of the cores that its processes have taken."""
        ticks = sum(int(fields[11]) + int(fields[12]) for fields in self.processes().values())
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """MiB that all of its processes hold, what they share counted once."""
        rolled = [(folder / "smaps_rollup").read_text() for folder in self.processes()]
        return sum(int(re.search(r"^Pss:\s+(\d+)", each, re.MULTILINE)[1]) for each in rolled) / 1024  # type: ignore[index]

    def find(self, content: bytes, until: float = 0.0) -> Any:
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            headers = {"x-patchlight-token": self.token, "Content-Type": "multipart/form-data; boundary=x"}
            connection.request("POST", self.path, FORM % content, headers)
            answer = connection.getresponse()
            said = answer.read()
            connection.close()
            if answer.status == 200:
                return json.loads(said)
            if answer.status != 503 or time.monotonic() > until:
                self.failed += 1
                return None
            self.refused += 1
            time.sleep(float(answer.headers.get("Retry-After", 1)))

    def wait(self) -> None:
        """Until it answers."""
        content = contents(1)[0]
        for _ in range(1200):
            try:
                if self.find(content) is not None:
                    break
            except OSError:
                pass
            time.sleep(0.1)
        else:
            raise SystemExit(f"{self.name} does not answer")
        self.refused = self.failed = 0


def boxes(said: Any) -> Any:
    """Of either server."""
    one = said["predictions"][0] if "predictions" in said else said
    return (
        one["decision"],
        one["confidence"],
        [each["box"] if isinstance(each, dict) else each for each in one["boxes"]],
    )


def load(server: Predictor, photos: list[bytes], wanted: list[Any], rate: float, seconds: float) -> list[float]:
    """Photos a second, the 99th percentile of the seconds that an answer took, and those of the cores for a photo."""
    count = max(10, int(rate * seconds))
    begin, cores = time.monotonic() + 0.2, server.cores()
    took: list[float] = []

    def ask(place: int) -> None:
        due = begin + place / rate
        time.sleep(max(0.0, due - time.monotonic()))
        said = server.find(photos[place % len(photos)], due + 120)
        if said is not None:
            assert boxes(said) == wanted[place % len(wanted)], server.name
            took.append(time.monotonic() - due)

    with ThreadPoolExecutor(count) as clients:
        list(clients.map(ask, range(count)))
    seconds = time.monotonic() - begin
    return [len(took) / seconds, sorted(took)[int(0.99 * (len(took) - 1))], (server.cores() - cores) / len(took)]


def beside(given: Any) -> None:
    photos, loaded = contents(given.different), pl.load("default")
    wanted = []
    for found in pl.localize(photos, loaded):
        corners = [[each.box.left, each.box.top, each.box.right, each.box.bottom] for each in found.subjects]
        wanted.append((found.decision, found.confidence, corners))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ours = subprocess.Popen(
        [sys.executable, "-m", "patchlight", "serve", "--port", "0", "--workers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Linux shares busy cores among sessions
    )
    peer = subprocess.Popen(
        [given.beside, str(Path(__file__).with_name("litserve_app.py")), str(port), "2"], start_new_session=True
    )
    try:
        assert ours.stdout is not None
        own_port = int(ours.stdout.readline().rpartition(":")[2].strip(" /\n"))
        token = ours.stdout.readline().split()[-1]
        servers = [
            Predictor("LitServe", port, "/predict", session=peer.pid),
            Predictor("patchlight", own_port, "/api/v1/predict", token, ours.pid),
        ]
        for server in servers:
            server.wait()
        start = time.monotonic()
        with ThreadPoolExecutor(8) as clients:
            list(clients.map(servers[0].find, photos * 2))
        capacity = 2 * len(photos) / (time.monotonic() - start)
        print(f"capacity, by LitServe with 8 clients: {capacity:.1f} photos/s")
        table: dict[tuple[str, int], list[list[float]]] = {}
        for number in range(given.rounds):
            for times in (1, 3):
                for server in servers[:: 1 if number % 2 else -1]:
                    got = load(server, photos, wanted, times * capacity, given.load_seconds / times)
                    table.setdefault((server.name, times), []).append(got)
        for times in (1, 3):
            print(f"{times} times the capacity, {given.rounds} rounds, medians:")
            for name in ("patchlight", "LitServe"):
                rate, last, cores = (statistics.median(each) for each in zip(*table[name, times], strict=True))
                print(f"  {name}: {rate:.1f} photos/s, p99 {last:.2f} s, {1000 * cores:.0f} ms of a core each")
            for which, what in enumerate(("photos a second", "p99", "seconds of a core")):
                pairs = zip(table["patchlight", times], table["LitServe", times], strict=True)
                ratios = [mine[which] / other[which] for mine, other in pairs]
                middle = statistics.median(ratios)
                print(f"  patchlight/LitServe, {what}: {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        for server in servers:
            held = f"{len(server.processes())} processes hold {server.memory():,.0f} MiB"
            print(f"{server.name}: {server.refused} times told to come again, {server.failed} never answered; {held}")
    finally:
        ours.terminate()
        ours.wait(60)
        os.killpg(peer.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            peer.wait(30)
        with contextlib.suppress(ProcessLookupError):  # where its first process ends, others of it may stay
            os.killpg(peer.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
