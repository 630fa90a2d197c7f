"""Predictions in one request: the library's own answers, by models of every family, and what Prometheus reads."""

import base64
import io
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import patchlight as pl
from crop_runs import photo
from models_at_random import randomize
from patchlight.serve.limits import Limits
from served import Answer, Served, serving

EDGE = "edge7MA4YWxkTrZu0gW"


def jpeg(seed: int) -> bytes:
    file = io.BytesIO()
    photo(seed, 320, 240).save(file, "JPEG", quality=90)
    return file.getvalue()


PHOTOS = [jpeg(seed) for seed in range(3)]


def predict(served: Served, contents: Sequence[bytes], **query: Any) -> Answer:
    parts = [
        f'--{EDGE}\r\nContent-Disposition: form-data; name="photo"; filename="{number}.jpg"\r\n\r\n'.encode()
        + content
        + b"\r\n"
        for number, content in enumerate(contents)
    ]
    body = b"".join([*parts, f"--{EDGE}--\r\n".encode()])
    words = "&".join(f"{name}={value}" for name, value in query.items())
    kind = f"multipart/form-data; boundary={EDGE}"
    return served.ask("POST", f"/api/v1/predict?{words}", body, Content_Type=kind)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    swin = pl.Swin(pl.variant("swin-T", image_size=56, depths=(1, 1), num_heads=(1, 2), width=8, num_classes=3)).eval()
    convnext = pl.ConvNeXt(pl.ConvNeXtConfig(image_size=64, widths=(8, 16), depths=(1, 1), num_classes=2)).eval()
    made = {}
    for name, model in (("swin", swin), ("convnext", convnext)):
        randomize(model)
        made[name] = pl.save(model, folder / name, labels=[f"class {n}" for n in range(model.config.num_classes)])
    return made


@pytest.fixture(scope="module")
def others(families: dict[str, Path]) -> Iterator[Served]:
    """No ViT among them."""
    with serving(*map(str, families.values()), limits=Limits(predicted=3)) as running:
        yield running


def test_boxes_are_localizes(served: Served) -> None:
    answer = predict(served, PHOTOS, subjects=0)
    assert answer.status == 200, answer.body[:300]
    found = pl.localize(PHOTOS, "default", subjects="all")
    said = answer.json()
    assert (said["model"], said["outputs"], len(said["predictions"])) == ("default", "boxes", 3)
    for number, (one, wanted) in enumerate(zip(said["predictions"], found, strict=True)):
        assert (one["name"], one["status"], one["width"], one["height"]) == (f"{number}.jpg", "ok", 320, 240)
        assert one["decision"] == wanted.decision
        assert one["confidence"] == pytest.approx(wanted.confidence, abs=1e-6)
        assert len(one["boxes"]) == len(wanted.subjects)
        for box, subject in zip(one["boxes"], wanted.subjects, strict=True):
            own = subject.box
            assert box["box"] == pytest.approx([own.left, own.top, own.right, own.bottom], abs=1e-3)
        assert one["classes"] is one["features"] is None


def test_what_is_transparent_says_where_the_subject_is(served: Served) -> None:
    image = Image.new("RGBA", (320, 240), (255, 240, 230, 0))
    image.paste((20, 20, 20, 255), (200, 20, 300, 220))
    file = io.BytesIO()
    image.save(file, "PNG")
    found = pl.localize(file.getvalue(), "default")
    assert found.method == "alpha"
    (one,) = predict(served, [file.getvalue()]).json()["predictions"]
    assert (one["decision"], one["confidence"]) == (found.decision, found.confidence) == ("subject", 1.0)
    assert [each["box"] for each in one["boxes"]] == [[200, 20, 300, 220]]
    classes = predict(served, [file.getvalue()], model="tiny", outputs="classes").json()["predictions"]
    assert classes[0]["status"] == "ok"


def test_classes_and_features_are_the_librarys(served: Served, tiny_folder: Path) -> None:
    loaded = pl.load(tiny_folder)
    said = predict(served, PHOTOS, model="tiny", outputs="classes", top=2).json()["predictions"]
    for one, wanted in zip(said, pl.classify(PHOTOS, loaded, top=2), strict=True):
        assert [each["name"] for each in one["classes"]] == list(wanted.names)
        assert [each["probability"] for each in one["classes"]] == pytest.approx(wanted.probabilities, abs=1e-6)
    said = predict(served, PHOTOS, model=1, outputs="features").json()["predictions"]
    assert np.array_equal(np.array([one["features"] for one in said], np.float32), pl.embed(PHOTOS, loaded))


def test_a_bad_photo_costs_its_own_answer_alone(served: Served) -> None:
    answer = predict(served, [PHOTOS[0], b"no photo at all", PHOTOS[1]], model="tiny")
    assert answer.status == 200
    first, bad, last = answer.json()["predictions"]
    assert (first["status"], last["status"]) == ("ok", "ok")
    assert (bad["status"], bad["reason"], bad["boxes"]) == ("error", "not-an-image", None)


def test_every_family(others: Served, families: dict[str, Path]) -> None:
    assert others.json("/models")["models"] == []  # of the page
    for name, source in families.items():
        loaded = pl.load(source)
        said = predict(others, PHOTOS, model=name, outputs="features").json()["predictions"]
        assert np.array_equal(np.array([one["features"] for one in said], np.float32), pl.embed(PHOTOS, loaded))
        (one,) = predict(others, PHOTOS[:1], model=name, outputs="classes").json()["predictions"]
        assert one["classes"][0]["name"] == pl.classify(PHOTOS[0], loaded).names[0]
        (one,) = predict(others, PHOTOS[:1], model=name).json()["predictions"]
        assert one["decision"] == pl.localize(PHOTOS[0], loaded).decision
    page = others.ask("GET", "/")
    assert b"no ViT is served here" in page.body
    shown = others.ask("GET", f"/api/v1/photos/{others.photo(PHOTOS[0])}/attention")
    assert (shown.status, shown.reason) == (422, "value")
    assert "/api/v1/predict takes all" in shown.json()["error"]["message"]
    assert others.get("/costs").status == 422


def test_what_is_refused(served: Served, others: Served, headless_folder: Path) -> None:
    assert predict(served, PHOTOS, model="nobody").reason == "unknown-model"
    assert predict(served, PHOTOS, model=99).reason == "unknown-model"
    assert predict(served, PHOTOS, model=headless_folder.name, outputs="classes").status == 422
    assert predict(served, PHOTOS, outputs="poems").status == 422
    assert predict(served, []).status == 422
    assert predict(others, [*PHOTOS, PHOTOS[0]]).status == 400  # one too many
    assert served.ask("POST", "/api/v1/predict", b"{}", Content_Type="application/json").status == 415
    assert served.ask("POST", "/api/v1/predict", b"", x_patchlight_token="wrong").status == 401
    answer = served.ask("POST", "/api/v1/predict", None, Content_Length=str(2**27))
    assert (answer.status, answer.reason) == (413, "too-large")


def test_a_bearer_token_is_a_token(served: Served) -> None:
    with_token = {"x_patchlight_token": "", "Authorization": f"Bearer {served.token}"}
    assert served.ask("POST", "/v2/models/tiny/infer", b"{}", **with_token).status == 401  # two that differ
    import http.client

    for token, status in ((served.token, 415), ("wrong", 401)):
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        connection.request("POST", "/api/v1/predict", b"{}", {"Authorization": f"Bearer {token}"})
        assert connection.getresponse().status == status
        connection.close()


# KServe


def infer(served: Served, name: str, asked: Any, binary: bytes = b"", **headers: str) -> Answer:
    head = json.dumps(asked).encode()
    if binary:
        headers["Inference-Header-Content-Length"] = str(len(head))
    return served.ask("POST", f"/v2/models/{name}/infer", head + binary, **headers)


def test_kserve_says_what_there_is(served: Served, others: Served) -> None:
    assert served.ask("GET", "/v2").json()["name"] == "patchlight"
    assert served.ask("GET", "/v2/health/live").json() == {"live": True}
    assert served.ask("GET", "/v2/health/ready").json() == {"ready": True}
    about = served.ask("GET", "/v2/models/tiny").json()
    assert about["inputs"][1] == {"name": "image", "datatype": "FP32", "shape": [-1, 3, 32, 32]}
    assert about["outputs"][2] == {"name": "features", "datatype": "FP32", "shape": [-1, 24]}
    assert served.ask("GET", "/v2/models/tiny/ready").json() == {"name": "tiny", "ready": True}
    assert [each["name"] for each in others.ask("GET", "/v2/models/convnext").json()["outputs"]] == [
        "logits",
        "probabilities",
        "features",
    ]
    missing = served.ask("GET", "/v2/models/none")
    assert missing.status == 404
    assert "there is no model 'none'" in missing.json()["error"]


def test_kserve_infers_from_photos_and_images(served: Served, tiny_folder: Path) -> None:
    loaded = pl.load(tiny_folder)
    wanted = loaded.predict(PHOTOS).numpy()
    coded = [base64.b64encode(content).decode() for content in PHOTOS]
    tensor: dict[str, Any] = {"name": "photo", "datatype": "BYTES", "shape": [3], "data": coded}
    said = infer(served, "tiny", {"id": "7", "inputs": [tensor]}).json()
    assert (said["id"], said["model_name"]) == ("7", "tiny")
    (output,) = said["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("logits", "FP32", [3, 5])
    assert np.array_equal(np.float32(output["data"]).reshape(3, 5), wanted)
    images = np.stack([loaded.preprocess(content)[0].numpy() for content in PHOTOS])
    names = [{"name": "features"}, {"name": "probabilities"}]
    tensor = {"name": "image", "datatype": "FP32", "shape": list(images.shape)}
    plain = infer(served, "tiny", {"inputs": [tensor | {"data": images.tolist()}], "outputs": names}).json()
    packed = images.astype("<f4").tobytes()
    about = tensor | {"parameters": {"binary_data_size": len(packed)}}
    binary = infer(served, "tiny", {"inputs": [about], "outputs": names}, packed).json()
    assert plain == binary
    features, shares = (np.float32(each["data"]) for each in plain["outputs"])
    assert np.array_equal(features.reshape(3, 24), pl.embed(PHOTOS, loaded))
    assert np.array_equal(shares.reshape(3, 5), loaded.predict(PHOTOS, "probabilities").numpy())
    strings = b"".join(struct.pack("<I", len(content)) + content for content in PHOTOS[:2])
    about = {"name": "photo", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(strings)}}
    (output,) = infer(served, "tiny", {"inputs": [about]}, strings).json()["outputs"]
    assert np.array_equal(np.float32(output["data"]).reshape(2, 5), wanted[:2])


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({}, "no request of the KServe v2 protocol"),
        ([], "no request of the KServe v2 protocol"),
        ({"inputs": [{"name": "x"}]}, "give one input"),
        ({"inputs": [{"name": "photo", "datatype": "FP32"}]}, "photo is BYTES, not 'FP32'"),
        ({"inputs": [{"name": "photo", "datatype": "BYTES", "shape": [0]}]}, "has the shape [B]"),
        ({"inputs": [{"name": "photo", "datatype": "BYTES", "shape": [99]}]}, "99 at once are too many"),
        (
            {"inputs": [{"name": "photo", "datatype": "BYTES", "shape": [1], "data": ["%"]}]},
            "a list of files in base64",
        ),
        ({"inputs": [{"name": "photo", "datatype": "BYTES", "shape": [2], "data": ["AA=="]}]}, "has 1 elements"),
        (
            {"inputs": [{"name": "photo", "datatype": "BYTES", "shape": [1], "data": ["AAAA"]}]},
            "not in an image format",
        ),
        ({"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 9999]}]}, "sides up to 1024"),
        ({"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [1]}]}, "1x3x8x8 numbers"),
        ({"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": [1]}]}, "has 3 channels"),
        (
            {"inputs": [{"name": "photo", "datatype": "BYTES", "shape": [1], "data": []}], "outputs": [{"name": "x"}]},
            "has 0 elements",
        ),
    ],
)
def test_kserve_refuses_in_its_own_form(served: Served, asked: Any, complaint: str) -> None:
    answer = infer(served, "tiny", asked)
    assert answer.status == 400, answer.body[:300]
    assert complaint in answer.json()["error"]


def test_kserve_binary_that_does_not_fit(served: Served) -> None:
    about = {"name": "photo", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}
    assert "not what follows" in infer(served, "tiny", {"inputs": [about]}, b"1234").json()["error"]
    assert "in the middle" in infer(served, "tiny", {"inputs": [about]}, b"\xff\0\0\0a").json()["error"]
    answer = infer(served, "tiny", {}, Inference_Header_Content_Length="999")
    assert "is not the length" in answer.json()["error"]
    coded = base64.b64encode(PHOTOS[0]).decode()
    about = {"name": "photo", "datatype": "BYTES", "shape": [1], "data": [coded]}
    answer = infer(served, "tiny", {"inputs": [about], "outputs": [{"name": "x"}]})
    assert "gives no output 'x'; it gives logits, probabilities, features" in answer.json()["error"]
    assert served.ask("GET", "/v2/nothing").status == 404


# Metrics


def test_prometheus_reads_what_happened(tiny_folder: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with serving(str(tiny_folder)) as served:

        def values() -> dict[tuple[str, ...], float]:
            answer = served.ask("GET", "/metrics")
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("text/plain")
            return {
                (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(answer.body.decode())
                for sample in family.samples
            }

        served.photo(PHOTOS[0])
        for _ in range(3):
            predict(served, PHOTOS)
        served.ask("POST", "/api/v1/predict", b"", x_patchlight_token="wrong")
        served.get("/photos/none")
        found = values()
        assert found["patchlight_requests_total", "POST", "/api/v1/predict", "200"] == 3
        assert found["patchlight_requests_total", "POST", "refused", "401"] == 1
        assert found["patchlight_requests_total", "GET", "/api/v1/photos/{photo}", "404"] == 1
        assert found["patchlight_request_seconds_count", "/api/v1/predict"] == 3
        assert (found["patchlight_ready",], found["patchlight_waiting",], found["patchlight_photos",]) == (1, 0, 1)
        assert found["patchlight_batch_photos_sum", "tiny"] == 3 * len(PHOTOS)
        assert found["patchlight_batch_seconds_sum", "tiny"] > 0
        assert found["patchlight_queue_seconds_count", "tiny"] == 3
    with serving(str(tiny_folder), remote=True) as served:
        assert served.ask("GET", "/metrics").status == 401
        assert served.ask("GET", "/v2").status == 401
        assert served.ask("GET", "/metrics", Authorization=f"Bearer {served.token}").status == 200


def test_a_large_image_is_limited_too(tiny_folder: Path) -> None:
    with serving(str(tiny_folder), limits=Limits(pixels=1000)) as served:
        file = io.BytesIO()
        Image.new("RGB", (64, 64)).save(file, "PNG")
        (one,) = predict(served, [file.getvalue()]).json()["predictions"]
        assert one["reason"] == "too-large"
