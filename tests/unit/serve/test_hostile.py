"""Requests that no page of ours would send."""

import contextlib
import io
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from patchlight.errors import PatchlightError
from patchlight.serve.limits import Limits
from patchlight.serve.running import Address, access_policy
from served import Answer, Served, form, serving

BAD_IMAGES = Path(__file__).parents[3].parent / "shared" / "data" / "bad-images"


@pytest.fixture(scope="module")
def narrow(tiny_folder: Path) -> Iterator[Served]:
    """A server with little room and no patience."""
    limits = Limits(
        upload_bytes=200_000,
        body_bytes=1000,
        pixels=1_000_000,
        uploads=2,
        requests=12,
        queue=2,
        batch=1,
        body_seconds=1.0,
    )
    with serving(str(tiny_folder), limits=limits) as running:
        yield running


def png(width: int = 40, height: int = 30) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(file, "PNG")
    return file.getvalue()


# Who asks


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1.evil.example:{port}", ""]
)
def test_another_name_is_refused_everywhere(served: Served, host: str) -> None:
    for path in ("/", "/api/v1/models", "/web/main.js", "/livez"):
        answer = served.ask("GET", path, Host=host.format(port=served.port))
        assert (answer.status, answer.reason) == (421, "host")


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}"])
def test_its_own_names_are_welcome(served: Served, host: str) -> None:
    assert served.ask("GET", "/api/v1/models", Host=host.format(port=served.port)).status == 200


def test_two_hosts_are_one_too_many(served: Served) -> None:
    hosts = f"Host: 127.0.0.1:{served.port}\r\nHost: evil.example\r\n"
    text = f"GET /api/v1/models HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n"
    assert raw(served, text.encode()).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1"])
def test_other_pages_may_not_send_or_read(served: Served, origin: str) -> None:
    origin = origin.format(port=served.port)
    assert served.send(png(), Origin=origin).reason == "origin"
    assert served.ask("GET", "/api/v1/models", Origin=origin).status == 403
    answer = served.send(png(), Origin=f"http://127.0.0.1:{served.port}")
    assert answer.status == 201
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_pages_cannot_make_the_browser_ask(served: Served, site: str) -> None:
    assert served.ask("GET", "/api/v1/costs", Sec_Fetch_Site=site).status == 403
    assert served.ask("GET", "/", Sec_Fetch_Site=site).status == 200  # a link that leads here is fine


@pytest.mark.parametrize("token", ["", "wrong", "x" * 5000])
def test_without_the_token_nothing_is_taken(served: Served, token: str) -> None:
    headers = {"x-patchlight-token": token}
    answer = served.send(png(), **headers)
    assert (answer.status, answer.reason) == (401, "token")
    assert served.ask("POST", "/api/v1/crops", b"{}", **headers).status == 401
    assert served.ask("DELETE", "/api/v1/photos/x", **headers).status == 401


def test_preflights_get_no_permission(served: Served) -> None:
    answer = served.ask("OPTIONS", "/api/v1/photos", Origin="http://evil.example", Access_Control_Request_Method="POST")
    assert answer.status in (403, 405)
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_beyond_this_machine_the_token_is_needed_to_read_too(tiny_folder: Path) -> None:
    with serving(str(tiny_folder), token="0123456789abcdef-known", remote=True) as remote:
        assert remote.ask("GET", "/api/v1/models").status == 401
        assert b"0123456789abcdef-known" not in remote.ask("GET", "/").body
        known = {"x-patchlight-token": remote.token}
        assert remote.ask("GET", "/api/v1/models", **known).status == 200
        photo = remote.photo(png())
        assert remote.ask("GET", f"/api/v1/photos/{photo}/preview").status == 401


def test_listening_to_others_is_a_decision_of_its_own() -> None:
    Address(host="127.0.0.1").check()
    with pytest.raises(PatchlightError, match="--allow-remote and --token"):
        Address(host="0.0.0.0").check()
    with pytest.raises(PatchlightError, match="16 characters or more"):
        Address(host="0.0.0.0", remote=True, token="short").check()
    Address(host="0.0.0.0", remote=True, token="x" * 16).check()
    access = access_policy(Address(host="0.0.0.0", remote=True, token="x" * 16, names=("Box.local",)), 80)
    assert access.remote
    assert {"box.local", "box.local:80", "localhost:80"} <= access.hosts
    assert not [host for host in access.hosts if "0.0.0.0" in host]


def test_headers_that_every_answer_has(served: Served) -> None:
    for path in ("/", "/web/main.js", "/api/v1/models", "/api/v1/nothing", "/livez"):
        headers = served.ask("GET", path).headers
        assert headers["x-content-type-options"] == "nosniff"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in headers


# What they ask for


@pytest.mark.parametrize(
    "path",
    [
        "/web/../app.py",
        "/web/..%2fapp.py",
        "/web/%2e%2e/app.py",
        "/web//etc/passwd",
        "/web/photos/../../app.py",
        "/etc/passwd",
    ],
)
def test_no_path_leads_out(served: Served, path: str) -> None:
    answer = served.ask("GET", path)
    assert answer.status == 404
    assert b"import" not in answer.body


@pytest.mark.parametrize("photo", ["..", "%2e%2e%2fetc", "x" * 65, "http:%2f%2fevil.example", "a%00b"])
def test_photos_are_named_by_ids_alone(served: Served, photo: str) -> None:
    answer = served.ask("GET", f"/api/v1/photos/{photo}/localize")
    assert answer.status in (404, 422)


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("localize", {"method": "magic"}),
        ("localize", {"model": 99}),
        ("localize", {"subjects": -1}),
        ("attention", {"query": "99,99"}),
        ("attention", {"query": "distill"}),
        ("attention", {"layer": 12}),
        ("attention", {"query": "1,1;drop"}),
        ("heads", {"layer": -13}),
        ("preview", {"side": 10**9}),
        ("crop", {"left": 0, "top": 0, "right": 0, "bottom": 0}),
        ("crop", {"left": "nan", "top": 0, "right": 9, "bottom": 9}),
        ("crop", {"left": "inf", "top": 0, "right": 9, "bottom": 9}),
        ("crop", {"left": 500, "top": 500, "right": 600, "bottom": 600}),
        ("crop", {"left": 0, "top": 0, "right": 9, "bottom": 9, "aspect": "0:1"}),
        ("crop", {"left": 0, "top": 0, "right": 9, "bottom": 9, "margin": 1e9}),
        ("shuffle", {"seed": -1}),
        ("classify", {"top": 0}),
    ],
)
def test_values_that_cannot_be_are_named(served: Served, path: str, values: dict[str, Any]) -> None:
    photo = served.photo(png())
    answer = served.get(f"/photos/{photo}/{path}", **values)
    assert answer.status in (404, 422)
    assert answer.json()["error"]["message"]


def test_bodies_that_are_no_orders(served: Served) -> None:
    for body in (b"", b"{", b"[]", b'{"crops": []}', b'{"crops": [{"photo": "x", "box": [1]}]}', b"\xff\xfe"):
        answer = served.ask("POST", "/api/v1/crops", body, Content_Type="application/json")
        assert answer.status in (400, 422), body
        assert answer.json()["error"]
    many = {"crops": [{"photo": "x", "box": [0, 0, 1, 1]}] * 200}
    answer = served.ask("POST", "/api/v1/crops", json.dumps(many).encode(), Content_Type="application/json")
    assert answer.status == 422


# Photos that are none


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"hello", "not-an-image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unsupported"),
        (png()[:60], "truncated"),
        (b"%PDF-1.4", "unsupported"),
        (b"GIF89a" + bytes(20), None),
    ],
)
def test_bad_photos_are_refused_with_a_reason(served: Served, content: bytes, reason: str | None) -> None:
    answer = served.send(content)
    assert answer.status == 422
    assert reason in (None, answer.reason)


def test_shared_bad_images_never_break_it(served: Served) -> None:
    if not BAD_IMAGES.is_dir():
        pytest.skip("../shared/data/bad-images is not here")
    files = [path for path in sorted(BAD_IMAGES.rglob("*")) if path.is_file() and path.stat().st_size < 4_000_000]
    for path in files[:80]:
        assert served.send(path.read_bytes(), "x.jpg").status in (201, 422), path
    assert not [line for line in served.log if line["status"] >= 500]


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is this large."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10_000))) + chunk(b"IEND", b"")
    )


def test_too_many_pixels(served: Served, narrow: Served) -> None:
    assert served.send(bomb(30_000, 30_000)).reason == "too-large"
    assert served.send(bomb(10_100, 10_000)).reason == "too-large"
    assert narrow.send(png(1200, 900)).reason == "too-large"
    assert narrow.send(png(1000, 900)).status == 201


def test_too_many_bytes(narrow: Served) -> None:
    body, kind = form(bytes(300_000))
    answer = narrow.ask("POST", "/api/v1/photos", body, Content_Type=kind)
    assert (answer.status, answer.reason) == (413, "too-large")
    # The same without saying how long it is.
    parts = [body[start : start + 65536] for start in range(0, len(body), 65536)]
    chunks = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts) + b"0\r\n\r\n"
    head = (
        f"POST /api/v1/photos HTTP/1.1\r\nHost: 127.0.0.1:{narrow.port}\r\nx-patchlight-token: {narrow.token}\r\n"
        f"Content-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    assert b" 413 " in raw(narrow, head.encode() + chunks)[:20]
    assert narrow.ask("POST", "/api/v1/crops", bytes(2000), Content_Type="application/json").status == 413
    assert narrow.ask("POST", "/api/v1/crops", b"{}", Content_Length="-1").status == 400


def test_one_photo_a_form(served: Served) -> None:
    body, kind = form(png())
    edge = kind.partition("boundary=")[2].encode()
    twice = body.removesuffix(b"--" + edge + b"--\r\n") + body
    assert served.ask("POST", "/api/v1/photos", twice, Content_Type=kind).status == 400
    assert served.send(png(), part="other").status == 422
    assert served.ask("POST", "/api/v1/photos", png(), Content_Type="image/png").status == 415
    assert served.ask("POST", "/api/v1/photos", body, Content_Type="multipart/form-data").status == 400
    assert served.ask("POST", "/api/v1/photos", b"nonsense", Content_Type=kind).status in (400, 422)
    field = b'--x\r\nContent-Disposition: form-data; name="photo"\r\n\r\n/etc/passwd\r\n--x--\r\n'
    path = served.ask("POST", "/api/v1/photos", field, Content_Type="multipart/form-data; boundary=x")
    assert path.status in (400, 422)


def test_names_come_back_as_text(served: Served) -> None:
    answer = served.send(png(), "<img src=x onerror=alert(1)>.png")
    assert answer.json()["name"] == "<img src=x onerror=alert(1)>.png"
    assert answer.headers["content-type"] == "application/json"
    photo = served.photo(png(), "x%0d%0aSet-Cookie: a=b\u2028\u00e9.png")
    crop = served.get(f"/photos/{photo}/crop", left=0, top=0, right=9, bottom=9)
    assert "set-cookie" not in crop.headers
    assert "\n" not in crop.headers["content-disposition"]


# Too much at a time


def raw(served: Served, data: bytes, wait: float = 10) -> bytes:
    with socket.create_connection(("127.0.0.1", served.port), timeout=wait) as connection:
        with contextlib.suppress(OSError):  # it may hang up on us in the middle
            connection.sendall(data)
        received = b""
        with contextlib.suppress(OSError):
            while part := connection.recv(65536):
                received += part
        return received


def test_a_body_that_never_ends_is_given_up(narrow: Served) -> None:
    body, kind = form(png())
    head = (
        f"POST /api/v1/photos HTTP/1.1\r\nHost: 127.0.0.1:{narrow.port}\r\nx-patchlight-token: {narrow.token}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    start = time.monotonic()
    assert b" 408 " in raw(narrow, head.encode() + body[:50])[:20]
    assert time.monotonic() - start < 5
    assert narrow.send(png()).status == 201


def test_past_the_queue_503_says_when_to_come_again(narrow: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = [narrow.photo(png(50 + i, 40)) for i in range(8)]
    hold, busy, run = threading.Event(), threading.Event(), narrow.engine.batches._run

    def held(key: Any, items: Any) -> Any:
        busy.set()
        hold.wait(20)
        return run(key, items)

    monkeypatch.setattr(narrow.engine.batches, "_run", held)
    answers: list[Answer] = []
    first, *others = (
        threading.Thread(target=lambda photo=photo: answers.append(narrow.get(f"/photos/{photo}/localize")))
        for photo in photos
    )
    threads = [first, *others]
    first.start()
    assert busy.wait(10)
    for thread in others:
        thread.start()
    deadline = time.monotonic() + 10
    while len(answers) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert narrow.ask("GET", "/livez").status == 200  # alive, however much there is to do
    assert len(answers) == 5  # one at the model, two wait, and five are sent away at once
    for answer in answers:
        assert (answer.status, answer.reason) == (503, "busy")
        assert int(answer.headers["retry-after"]) >= 1
    hold.set()
    for thread in threads:
        thread.join(20)
    assert sorted(answer.status for answer in answers) == [200] * 3 + [503] * 5
    assert all(narrow.get(f"/photos/{photo}/localize").status == 200 for photo in photos)


def test_predictions_past_the_queue_are_sent_away(narrow: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, run = threading.Event(), narrow.engine.batches._run

    def held(key: Any, items: Any) -> Any:
        hold.wait(20)
        return run(key, items)

    def predict(count: int) -> Answer:
        body, kind = form(png())
        end = b"--" + kind.partition("boundary=")[2].encode() + b"--\r\n"
        return narrow.ask("POST", "/api/v1/predict", body.removesuffix(end) * count + end, Content_Type=kind)

    def waiting() -> bytes:
        lines = narrow.ask("GET", "/metrics").body.splitlines()
        return next(line for line in lines if line.startswith(b"patchlight_waiting "))

    def ask(count: int, wait_for: bytes) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.append(predict(count)))
        thread.start()
        deadline = time.monotonic() + 10
        while waiting() != b"patchlight_waiting " + wait_for:
            assert time.monotonic() < deadline, waiting()
            time.sleep(0.02)
        return thread

    monkeypatch.setattr(narrow.engine.batches, "_run", held)
    answers: list[Answer] = []
    # Two are in hand, of which the model has one; another waits.
    threads = [ask(3, b"2.0")]
    image = {"name": "image", "datatype": "FP32", "shape": [2, 3, 1, 1], "data": [0.0] * 6}
    start = time.monotonic()
    refused = [predict(2), narrow.ask("POST", "/v2/models/tiny/infer", json.dumps({"inputs": [image]}).encode())]
    assert time.monotonic() - start < 5
    for answer in refused:
        assert (answer.status, b"photos wait for the model" in answer.body) == (503, True), answer.body
        assert int(answer.headers["retry-after"]) >= 1
    threads.append(ask(1, b"3.0"))  # there is room for one, which those that were sent away do not take
    assert not answers
    hold.set()
    for thread in threads:
        thread.join(20)
    assert [answer.status for answer in answers] == [200, 200]
    assert [len(answer.json()["predictions"]) for answer in answers] == [3, 1]  # first come, first served


def test_what_takes_too_long_is_given_up(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(
        str(tiny_folder), limits=Limits(answer_seconds=3.0)
    ) as hasty:  # enough to send a photo, on any machine
        photo, hold, run = hasty.photo(png()), threading.Event(), hasty.engine.batches._run

        def held(key: Any, items: Any) -> Any:
            hold.wait(20)
            return run(key, items)

        monkeypatch.setattr(hasty.engine.batches, "_run", held)
        answer = hasty.get(f"/photos/{photo}/localize")
        assert (answer.status, answer.reason) == (504, "timeout")
        hold.set()
        deadline = time.monotonic() + 10
        while hasty.get(f"/photos/{photo}/localize").status != 200:
            assert time.monotonic() < deadline


def test_too_many_requests_at_once(narrow: Served) -> None:
    body, kind = form(png())
    head = (
        f"POST /api/v1/photos HTTP/1.1\r\nHost: 127.0.0.1:{narrow.port}\r\nx-patchlight-token: {narrow.token}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    held = [socket.create_connection(("127.0.0.1", narrow.port)) for _ in range(14)]
    try:
        for connection in held:
            connection.sendall(head.encode() + body[:10])
        time.sleep(0.3)
        refused = narrow.get("/models")
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert narrow.ask("GET", "/livez").status == 200
    finally:
        for connection in held:
            connection.close()


def test_the_log_is_one_object_a_request_and_keeps_secrets(served: Served) -> None:
    before = len(served.log)
    served.send(png(), "secret name.png")
    deadline = time.monotonic() + 5
    while len(served.log) == before and time.monotonic() < deadline:  # it is written when the answer is out
        time.sleep(0.01)
    (line,) = served.log[before:]
    assert set(line) == {"time", "method", "path", "status", "ms", "bytes"}
    assert (line["method"], line["path"], line["status"]) == ("POST", "/api/v1/photos", 201)
    text = json.dumps(list(served.log))
    assert served.token not in text
    assert "secret name" not in text
