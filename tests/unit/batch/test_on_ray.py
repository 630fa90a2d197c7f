"""Runs on a real Ray cluster of three nodes, which are processes of this machine: what is killed costs nothing."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crop_runs import everything_in, make_photos, photo, run_crop, save_model
from patchlight.batch.settings import CropRunSettings
from patchlight.batch.table_run import embed_photos
from patchlight.reporting import Progress, Reporter

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of the pipes to the processes of Ray
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),  # of its own settings
]

MARK = "PATCHLIGHT_TEST_OF_RAY"
"""Tells the processes of this cluster from others."""

STORE = 80 * 2**20
"""Bytes of each node's object store: about as few as Ray takes."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    # A folder of its own, so that no other test finds this cluster; with a short name, for sockets lie in it.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    quiet = {
        MARK: str(os.getpid()),
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_raylet_start_wait_time_s": "300",  # on a busy machine
        "RAY_py_gcs_connect_timeout_s": "300",
        "RAY_gcs_server_request_timeout_seconds": "300",
        "RAY_BACKEND_LOG_LEVEL": "fatal",
    }
    before = {name: os.environ.get(name) for name in (*quiet, "PYTHONPATH")}
    # The nodes' workers find the tests' modules and the package where this process does.
    os.environ.update(quiet, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    made = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False},
    )
    for _ in range(2):
        made.add_node(num_cpus=1, object_store_memory=STORE)
    yield made
    importlib.import_module("ray").shutdown()
    made.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a bad one in every block of ten."""
    folder = tmp_path_factory.mktemp("photos")
    make_photos(folder, 108)
    for number in range(0, 108, 9):
        (folder / f"{number:03}-bad.jpg").write_bytes(b"not a photo")
    return folder


def actors(stage: str) -> list[int]:
    """The processes that do this, on any node of the cluster."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            names = (process / "cmdline").read_text(), (process / "environ").read_text()
            if f"MapWorker(Map({stage}))" in names[0] and f"{MARK}={os.getpid()}\0" in names[1]:
                found.append(int(process.name))
        except (OSError, ValueError):  # it is gone, or none
            continue
    return found


def test_killed_actors_and_nodes_cost_nothing(
    cluster: Any, photos: Path, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_crop(photos, tmp_path / "one", model=model, workers=1, formats=["parquet"])
    said: list[int] = []
    dying = threading.Thread(
        target=cluster.remove_node, args=(min(cluster.worker_nodes, key=id),), kwargs={"allow_graceful": False}
    )
    killed = []

    def progress(now: Progress) -> None:
        if now.what != "photo":
            return
        said.append(now.done)
        if len(said) == 2:
            killed.extend(actors("Looks")[:1])
            os.kill(killed[0], signal.SIGKILL)
        if len(said) == 4:
            dying.start()

    on = f"ray:{cluster.address}"
    summary = run_crop(photos, tmp_path / "two", model=model, workers=1, on=on, progress=progress)
    dying.join()
    assert killed
    assert len(cluster.worker_nodes) == 1
    assert (summary.photos, summary.computed, summary.failed, summary.crops) == (120, 120, 12, 108)
    assert said == [*range(10, 121, 10)]
    assert everything_in(tmp_path / "two") == everything_in(tmp_path / "one")
    assert not (tmp_path / "two" / ".run" / "parts").exists()
    assert capfd.readouterr() == ("", "")
    assert run_crop(photos, tmp_path / "two", model=model, workers=1, on=on).nothing_to_do
    assert run_crop(photos, tmp_path / "two", model=model, workers=1, formats=["parquet"]).nothing_to_do  # and here


def test_ctrl_c_and_going_on(cluster: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    large = tmp_path / "photos" / "00.jpg"
    photo(0, 4000, 3000).save(large)
    for number in range(1, 40):
        os.link(large, tmp_path / "photos" / f"{number:02}.jpg")
    given = ["embed", str(tmp_path / "photos"), "--model", str(model), "--out", "two.parquet", "--workers", "1"]
    command = [sys.executable, "-m", "patchlight", *given, "--on", f"ray:{cluster.address}"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "two.parquet.run" / "journal.jsonl"
    until = time.monotonic() + 600
    while not (journal.exists() and journal.stat().st_size) and time.monotonic() < until and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert out == ""
    assert "stopped after" in err.splitlines()[-1]
    assert "run the same command again to continue" in err.splitlines()[-1]
    assert not (tmp_path / "two.parquet").exists()
    done = len(journal.read_text().splitlines())
    assert 0 < done < 40
    left = len(list((tmp_path / "two.parquet.run" / "parts").glob("*.parquet"))) * 5

    how = CropRunSettings(workers=1, on=f"ray:{cluster.address}")
    two = embed_photos(tmp_path / "photos", tmp_path / "two.parquet", how=how, model=model, reporter=Reporter())
    assert two.computed == 40 - done - left
    how = CropRunSettings(workers=1)
    embed_photos(tmp_path / "photos", tmp_path / "one.parquet", how=how, model=model, reporter=Reporter())
    assert (tmp_path / "two.parquet").read_bytes() == (tmp_path / "one.parquet").read_bytes()
