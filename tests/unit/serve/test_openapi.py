"""The OpenAPI document, and requests drawn from it: every answer is one that the document promises."""

import io
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from served import Served

SAFE = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="/?#&%+=\\"), max_size=12)


@pytest.fixture(scope="module")
def document(served: Served) -> Any:
    return served.json("/openapi.json")


@pytest.fixture(scope="module")
def photo(served: Served) -> str:
    file = io.BytesIO()
    Image.effect_noise((90, 60), 60).convert("RGB").save(file, "JPEG")
    return served.photo(file.getvalue())


def values(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    """Texts for a parameter, most of them as its schema wants them, some not."""
    if "enum" in schema:
        right: st.SearchStrategy[Any] = st.sampled_from(schema["enum"])
    elif "pattern" in schema and "cls" in schema["pattern"]:
        right = st.sampled_from(["cls", "registers", "0,0", "15,15", "16,0", "9999,9999"])
    elif schema.get("type") == "integer":
        right = st.integers(max(schema.get("minimum", -(2**31)), -(2**31)), min(schema.get("maximum", 2**31), 2**31))
    elif schema.get("type") == "number":
        right = st.floats(schema.get("minimum", -1e6), schema.get("maximum", 1e6)) | st.floats(0, 90)
    elif schema.get("type") == "boolean":
        right = st.sampled_from(["false", "no"])  # measuring takes its time
    else:
        right = st.sampled_from(["free", "1:1", "3:2", "x"]) | SAFE
    return st.one_of(right, right, right, SAFE, st.integers(), st.floats()).map(str)


def operations(document: Any) -> list[tuple[str, str, Any]]:
    return [(path, method, what) for path, all_of in document["paths"].items() for method, what in all_of.items()]


def test_the_document_lists_the_librarys_functions(document: Any) -> None:
    paths = [path.rpartition("/")[2] for path in document["paths"]]
    assert {"localize", "crop", "attention", "classify", "costs", "models"} <= set(paths)
    for path, method, what in operations(document):
        assert what.get("summary"), (path, method)
        if path.startswith("/api/"):
            assert {"403", "404", "422", "503"} <= set(what["responses"]), (path, method)


def resolve(schema: dict[str, Any], document: Any) -> dict[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def check(value: Any, schema: dict[str, Any], document: Any, where: str = "") -> None:
    """That JSON is of a schema, as far as this document's schemas go."""
    schema = resolve(schema, document)
    if "anyOf" in schema:
        kinds = [resolve(each, document).get("type") for each in schema["anyOf"]]
        assert (value is None and "null" in kinds) or (value is not None and kinds[0] != "null"), where
        return
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": int | float, "boolean": bool}
    assert isinstance(value, kinds[schema["type"]]), where
    if "enum" in schema:
        assert value in schema["enum"], where
    if schema["type"] == "object":
        assert set(schema.get("required", ())) <= set(value), where
        for name, part in value.items():
            check(part, schema["properties"][name], document, f"{where}.{name}")
    elif schema["type"] == "array":
        assert schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9), where
        for part in value[:20]:
            check(part, schema["items"], document, f"{where}[]")


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_every_answer_is_promised(served: Served, document: Any, photo: str, data: st.DataObject) -> None:
    reading = [each for each in operations(document) if each[1] == "get"]
    path, _, what = data.draw(st.sampled_from(reading))
    query = []
    for parameter in what.get("parameters", ()):
        schema = resolve(parameter["schema"], document)
        if parameter["in"] == "path":
            known = photo if parameter["name"] == "photo" else "0"
            path = path.replace(f"{{{parameter['name']}}}", data.draw(st.sampled_from([known] * 5 + ["x", "-1"])))
        elif parameter["required"] or data.draw(st.booleans()):
            query.append(f"{parameter['name']}={data.draw(values(schema))}")
    answer = served.ask("GET", path + ("?" + "&".join(query) if query else ""))
    assert str(answer.status) in what["responses"], (path, query, answer.status, answer.body[:300])
    assert answer.status < 500, (path, query)
    content = what["responses"][str(answer.status)].get("content", {})
    kind = answer.headers.get("content-type", "")
    if "application/json" in content:
        assert kind == "application/json"
        check(json.loads(answer.body), content["application/json"]["schema"], document)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_orders_of_any_shape(served: Served, document: Any, photo: str, data: st.DataObject) -> None:
    number = st.floats(-100, 200) | st.floats() | st.integers()
    order = st.fixed_dictionaries(
        {"photo": st.sampled_from([photo, "x"]) | JSON, "box": st.lists(number, min_size=4, max_size=4) | JSON},
        optional={"margin": number, "aspect": st.sampled_from(["free", "2:1"]) | JSON, "more": JSON},
    )
    body = data.draw(st.fixed_dictionaries({"crops": st.lists(order, max_size=3)}) | JSON)
    answer = served.ask("POST", "/api/v1/crops", json.dumps(body).encode(), Content_Type="application/json")
    assert str(answer.status) in document["paths"]["/api/v1/crops"]["post"]["responses"]
    assert answer.status < 500


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    content=st.binary(max_size=300), start=st.sampled_from([b"", b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"GIF89a"])
)
def test_photos_of_any_bytes(served: Served, content: bytes, start: bytes) -> None:
    answer = served.send(start + content)
    assert answer.status == 422
    assert answer.json()["error"]["reason"]
