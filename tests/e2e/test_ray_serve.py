"""The application of docs/scale.md, started by Ray Serve."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import patchlight as pl

ROOT = Path(__file__).parents[2]
PHOTO = ROOT / "demo" / "dragonfly.jpg"

STARTED = """
import sys, urllib.request

import ray
from ray import serve

port, photo = int(sys.argv[1]), open(sys.argv[2], "rb").read()
for tries in range(4):
    try:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80_000_000,
            _temp_dir=sys.argv[3],
        )
        break
    except Exception as error:  # Ray waits 30 seconds for its own processes, which is too short on a busy machine
        if "timed out during startup" not in str(error) or tries == 3:
            raise
        ray.shutdown()
try:
    serve.start(http_options=serve.HTTPOptions(host="127.0.0.1", port=port))
    import finder

    serve.run(finder.app)
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/", photo)
    print("ANSWER", urllib.request.urlopen(asked, timeout=120).read().decode())
    serve.shutdown()
finally:
    ray.shutdown()
"""


def test_the_example_answers(tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "scale.md").read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "@serve.deployment" in block)
    (tmp_path / "finder.py").write_text(code.replace("num_replicas=2", "num_replicas=1"))  # for the suite's time
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # or it leaves a token in the home folder
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
    }
    temporary = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets lie in it, whose paths have to be short
    command = [sys.executable, "-c", STARTED, str(port), str(PHOTO), str(temporary)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        said, errors = process.communicate(timeout=400)
    finally:
        with contextlib.suppress(ProcessLookupError):  # whatever of Ray is still there
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(temporary, ignore_errors=True)
    (answer,) = re.findall(r"^ANSWER (.*)$", said, re.MULTILINE) or pytest.fail(errors)
    found = pl.localize(PHOTO)
    boxes = [list(subject.box.to_ints()) for subject in found.subjects]
    assert json.loads(answer) == {"decision": found.decision, "confidence": found.confidence, "boxes": boxes}
