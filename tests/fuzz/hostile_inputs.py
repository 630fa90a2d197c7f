"""What is fuzzed: everything that reads what others wrote. Seeds are made here, as small as they come."""

import argparse
import base64
import contextlib
import io
import json
import re
import shutil
import struct
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzzing import Target
from PIL import Image, PngImagePlugin, TiffImagePlugin
from safetensors.torch import save as save_safetensors

from crop_runs import make_photos, rows_of, run_crop, save_model
from models_at_random import tiny_vit
from patchlight.errors import PatchlightError
from patchlight.weights.convert import convert_to
from patchlight.weights.vit.names import TIMM

MOST_PIXELS = 2_000_000
"""Of photos here: what is allowed to be large is not what is looked for."""


def make(name: str) -> Target:
    return TARGETS[name]()


def scratch() -> Path:
    """A folder that goes with the process, in memory where there is such a place."""
    memory = Path("/dev/shm")
    folder = tempfile.TemporaryDirectory(prefix="patchlight-fuzz-", dir=memory if memory.is_dir() else None)
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@contextlib.contextmanager
def refusals(said: list[str]) -> Iterator[None]:
    """What is allowed to be raised: one line."""
    try:
        yield
    except PatchlightError as error:
        if "\n" in str(error) or len(str(error)) > 3000:
            raise AssertionError(f"a refusal of more than a line: {error!s:.200}") from error
        said.append(str(error).partition(": ")[2])


# Checksums


def _png_repaired(content: bytes) -> bytes:
    """After the first byte, which chooses."""
    png, place = bytearray(content[1:]), 8
    while png.startswith(b"\x89PNG") and place + 12 <= len(png):
        (length,) = struct.unpack_from(">I", png, place)
        end = place + 8 + length
        if end + 4 > len(png):
            break
        struct.pack_into(">I", png, end, zlib.crc32(png[place + 4 : end]))
        place = end + 4
    return content[:1] + bytes(png)


def _zip_repaired(content: bytes) -> bytes:
    archive = bytearray(content[1:])
    directory = archive.rfind(b"PK\x05\x06")
    with contextlib.suppress(struct.error):
        count, _, place = struct.unpack_from("<HII", archive, directory + 10) if directory >= 0 else (0, 0, 0)
        for _ in range(count):
            size, name, extra, comment = struct.unpack_from("<IxxxxHHH", archive, place + 20)
            (local,) = struct.unpack_from("<I", archive, place + 42)
            start = local + 30 + sum(struct.unpack_from("<HH", archive, local + 26))
            check = zlib.crc32(archive[start : start + size])
            struct.pack_into("<I", archive, place + 16, check)
            struct.pack_into("<I", archive, local + 14, check)
            place += 46 + name + extra + comment
    return content[:1] + bytes(archive)


def _tar_repaired(content: bytes) -> bytes:
    tar = bytearray(content[1:])
    for place in range(0, len(tar) - 511, 512):
        if tar[place + 257 : place + 262] == b"ustar":
            tar[place + 148 : place + 156] = b" " * 8
            tar[place + 148 : place + 155] = b"%06o\0" % (sum(tar[place : place + 512]) & 0o777777)
    return content[:1] + bytes(tar)


# Photos


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def photo_seeds() -> list[bytes]:
    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 255, (4, 6, 3), np.uint8)).resize((24, 16))
    rgba = rgb.copy()
    rgba.putalpha(Image.linear_gradient("L").resize(rgb.size))
    exif = Image.Exif()
    exif[0x112], exif[0x10F], exif[0x100] = 6, "Maker", 24
    exif.get_ifd(0x8769).update({0x9003: "2024:05:14 06:30:12", 0xA002: 24, 0xA003: 16, 0x9291: "12"})
    exif.get_ifd(0x8825).update({1: "N", 2: (1.0, 2.0, 3.0)})
    xmp = (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description tiff:Orientation="6" exif:PixelXDimension="24">'
        b"<dc:subject><rdf:Bag><rdf:li>old</rdf:li></rdf:Bag></dc:subject><xmp:Thumbnails>x</xmp:Thumbnails>"
        b"</rdf:Description></rdf:RDF></x:xmpmeta>"
    )
    iptc = b"\x1c\x01\x5a\x00\x03\x1b%G\x1c\x02\x19\x00\x03old"
    photoshop = b"Photoshop 3.0\0" + b"8BIM" + struct.pack(">HHI", 0x0404, 0, len(iptc)) + iptc + b"\0"
    extra = b"\xff\xed" + struct.pack(">H", len(photoshop) + 2) + photoshop
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp.decode(), zip=True)
    text.add_text("comment", "a" * 50)
    text.add(b"gAMA", struct.pack(">I", 45455))
    text.add(b"cHRM", struct.pack(">8I", *range(1, 9)))
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[274], tags[700], tags[270] = 8, xmp, "words"
    deep = Image.fromarray(rng.integers(0, 65535, (8, 8), np.uint16))
    return [
        _saved(rgb, "JPEG", exif=exif, xmp=xmp, extra=extra, quality=50),
        _saved(rgb, "JPEG", progressive=True, subsampling=2, icc_profile=b"profile" * 9, dpi=(72, 72)),
        _saved(rgb.convert("CMYK"), "JPEG"),
        _saved(rgb.convert("L"), "JPEG", exif=exif),
        _saved(rgb, "MPO", save_all=True, append_images=[rgb.resize((8, 8))]),
        _saved(rgb, "PNG", pnginfo=text, exif=exif),
        _saved(rgb.quantize(4), "PNG", transparency=b"\x00\x80\xff"),
        _saved(rgba, "PNG"),
        _saved(deep, "PNG"),
        _saved(rgb, "PNG", transparency=(1, 2, 3)),
        _saved(rgb, "WEBP", quality=40, exif=exif, xmp=xmp),
        _saved(rgba, "WEBP", lossless=True),
        _saved(rgb, "TIFF", compression="tiff_lzw", tiffinfo=tags),
        _saved(deep, "TIFF", exif=exif),
        _saved(rgb.convert("F"), "TIFF"),
        _saved(rgb, "GIF", save_all=True, append_images=[rgba.convert("P")], transparency=1),
        _saved(rgb, "BMP"),
        _saved(rgb, "PPM"),
        _saved(rgb, "JPEG2000"),
        _saved(rgb, "AVIF", quality=30),
    ]


def photos() -> Target:
    from patchlight.batch.frames import read_frame
    from patchlight.geometry import Box
    from patchlight.images.crop import Cut, cut_out, exif_of_crop
    from patchlight.images.cutout import HeatMap
    from patchlight.images.decode import decode

    heat = HeatMap(np.arange(16, dtype=np.uint8).reshape(4, 4) * 16, Box(0, 0, 24, 16))
    ways = (
        Cut(keywords=("a word", "<b>\u00e9")),
        Cut(margin=0.2, aspect=(1, 1), longest=9),
        Cut(exact=(12, 12), pad="blur", keywords=("x",)),
        Cut(cutout=True),
        Cut(cutout=True, background="#102030", keywords=("y",)),
        Cut(jpegtran=shutil.which("jpegtran"), keywords=("lossless",)),
    )
    path = scratch() / "cam_0001.jpg"

    def feed(content: bytes) -> str:
        way, content = content[:1], content[1:]
        how, said = ways[(way or b"\0")[0] % len(ways)], list[str]()
        with refusals(said):
            decoded = decode(content, max_pixels=MOST_PIXELS)
            height, width = decoded.source_size
            assert decoded.image.mode == "RGB"
            assert decoded.image.size == (width, height)
            said.append(f"{decoded.format} {decoded.orientation} {decoded.alpha is not None}")
        with refusals(said):
            small = decode(content, max_pixels=MOST_PIXELS, fast_size=(4, 4))
            said.append("small")
            assert small.source_size[0] > 0
        boxes = [Box(1, 2, 13, 11), Box(0, 0, 1, 1)]
        with refusals(said):
            crops = cut_out(content, boxes, how, max_pixels=MOST_PIXELS, heat=heat)
            assert len(crops) == 2
            for crop in crops:
                with Image.open(io.BytesIO(crop.content)) as written:
                    turned = written.getexif().get(0x112, 1) in (5, 6, 7, 8)
                    assert (written.size[::-1] if turned else written.size) == crop.size, "not as large as is said"
                    written.load()
            said.append(f"cut {crops[0].format} {crops[0].encoded}")
        exif_of_crop(content, (4, 5), 1)
        path.write_bytes(content)
        frame = read_frame(path)
        assert frame.time is None or frame.time == frame.time
        return " ".join(said)

    seeds = [bytes([number % len(ways)]) + seed for number, seed in enumerate(photo_seeds())]
    seeds += [b"\x05" + seed for seed in photo_seeds()[:4]]
    words = (
        b"<dc:subject>",
        b"<rdf:Bag>",
        b"</rdf:RDF>",
        b"<xmp:Thumbnails ",
        b"\xff\xe1",
        b"Exif\0\0",
        b"II*\0",
        b"IDAT",
    )
    return Target("photos", seeds, feed, repair=_png_repaired, words=words)


# Checkpoints


def _state() -> dict[str, torch.Tensor]:
    state = convert_to(tiny_vit(width=4, depth=1, num_heads=1, patch_size=16, mlp_dim=4).state_dict(), TIMM)
    for key in ("cls_token", "pos_embed"):
        state[key] = state[key].unsqueeze(0)
    return {key: value.clone() for key, value in state.items()}


def checkpoint() -> Target:
    from patchlight.weights.load import load
    from patchlight.weights.read import CheckpointError

    state, kinds = _state(), ("safetensors", "pt", "pth", "npz", "bin")

    def torch_file(content: Any, **options: Any) -> bytes:
        file = io.BytesIO()
        torch.save(content, file, **options)
        return file.getvalue()

    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{key: value.numpy() for key, value in state.items()})
    squeezed = io.BytesIO()
    np.savez_compressed(squeezed, allow_pickle=False, a=np.zeros(9), b=np.zeros(3, ">f4"))
    beside = {
        "epoch": 1,
        "arch": "vit_tiny_patch16_224",
        "args": argparse.Namespace(img_size=32, model_kwargs={"a": 1}),
    }
    seeds = [
        b"\0" + save_safetensors(state),
        b"\0" + save_safetensors({"a.b": torch.zeros(2, dtype=torch.bfloat16)}, {"format": "pt"}),
        b"\1" + torch_file({"state_dict": state} | beside),
        b"\1"
        + torch_file({"model": {"x": torch.zeros(2, 3)}, "scale": np.float64(2), "mean": np.zeros(2), "b": b"x\xff"}),
        b"\2" + torch_file({"model": {"x": torch.zeros(2, 3)}, "epoch": 1}, _use_new_zipfile_serialization=False),
        b"\2" + torch_file({"w": torch.zeros(2), "b": b"x\xff"} | beside, _use_new_zipfile_serialization=False),
        b"\3" + file.getvalue(),
        b"\3" + squeezed.getvalue(),
        b"\4" + torch_file({f"module.{key}": value.half() for key, value in state.items()}),
    ]
    folder = scratch()

    def feed(content: bytes) -> str:
        kind, content = content[:1], content[1:]
        path, said = folder / f"x.{kinds[(kind or b'x')[0] % len(kinds)]}", list[str]()
        path.write_bytes(content)
        with refusals(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model = load(path, num_heads=1).model
            except CheckpointError as error:
                if not str(error).startswith(str(path)):
                    raise AssertionError("a refusal without the name of the file") from error
                raise
            assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
            said.append("loaded")
        return " ".join(said)

    words = (b"blocks.0.", b"_codecs.encode", b"bytearray\n", b"ctorch._utils\n", b"q\x01", b"\x8a\x08", b"PK\x05\x06")
    return Target("checkpoint", seeds, feed, repair=_zip_repaired, words=words)


# Folders of models: their JSON


def model_folder() -> Target:
    from patchlight.config import PreprocessConfig
    from patchlight.deploy.engines import load_engine
    from patchlight.families import config_from_json
    from patchlight.images.preprocess import Preprocess
    from patchlight.models.prepack import prepack_linears  # noqa: F401, imported before time and memory are measured
    from patchlight.weights.groups import Groups
    from patchlight.weights.load import load
    from patchlight.weights.save import save

    folder, state = scratch(), _state()
    ours = save(
        tiny_vit(width=4, depth=1, num_heads=1, patch_size=16, mlp_dim=4, num_classes=2),
        folder / "ours",
        labels=["a", "b"],
        groups=Groups(("a", "b"), ("animal", "thing")),
    )
    theirs = folder / "theirs"
    theirs.mkdir()
    (theirs / "model.safetensors").write_bytes(save_safetensors(state))
    shards = folder / "shards"
    shards.mkdir()
    half = len(state) // 2
    parts = [dict(list(state.items())[:half]), dict(list(state.items())[half:])]
    for number, part in enumerate(parts):
        (shards / f"{number}.safetensors").write_bytes(save_safetensors(part))
    index = {"weight_map": {key: f"{number}.safetensors" for number, part in enumerate(parts) for key in part}}
    own = json.loads((ours / "config.json").read_text())
    manifest = {
        "version": 1,
        "format": "safetensors",
        "precision": "float32",
        "outputs": ["logits", "features"],
        "channels": 3,
        "size": [32, 32],
        "step": [16, 16],
        "with_preprocess": False,
        "source": "default",
        "model": {"origin": "patchlight", "sha256": "0" * 64, "patchlight": own["patchlight"]},
    }
    vit = {
        "model_type": "vit",
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 4,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "image_size": 32,
        "patch_size": 16,
        "qkv_bias": True,
        "id2label": {"0": "a", "1": "b"},
        "pruned_heads": {},
    }
    timm = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 5,
        "global_pool": "token",
        "model_args": {"img_size": 32, "num_heads": 1, "depth": 1, "init_values": None, "act_layer": "gelu"},
        "pretrained_cfg": {
            "input_size": [3, 32, 32],
            "interpolation": "bicubic",
            "crop_pct": 0.9,
            "crop_mode": "center",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "label_names": ["a", "b", "c", "d", "e"],
        },
    }
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": 32, "width": 32},
        "crop_size": {"height": 32, "width": 32},
        "do_center_crop": True,
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 0.00392156862745098,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    whole = [
        (ours, "config.json", own),
        (theirs, "config.json", timm),
        (theirs, "config.json", vit),
        (theirs, "config.json", {"model_type": "clip", "vision_config": vit | {"projection_dim": 4}}),
        (theirs, "config.json", timm["pretrained_cfg"] | {"architecture": "vit_tiny_patch16_224", "labels": ["a"]}),
        (theirs, "preprocessor_config.json", processor),
        (theirs, "processor_config.json", {"image_processor": processor}),
        (shards, "model.safetensors.index.json", index),
        (ours, "engine.json", manifest),
        (ours, "preprocess.json", own["patchlight"]["preprocess"]),
        (ours, "model.json", own["patchlight"]["model"]),
    ]
    photo = Image.new("RGB", (20, 10), "red")
    good = (ours / "config.json").read_bytes()

    def feed(content: bytes) -> str:
        place, name, _ = whole[(content or b"\0")[0] % len(whole)]
        (place / name).write_bytes(content[1:])
        said: list[str] = []
        with refusals(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if name == "engine.json":
                engine = load_engine(place)
                assert isinstance(engine.takes, str)
                assert isinstance(engine.label, str)
                said.append(engine.loaded.config.architecture + engine.fingerprint[:5])
                answer = engine(np.zeros((1, 3, 32, 32), np.float32))
                said.append(" ".join(sorted(answer)))
                said.append(str(engine.loaded.predict(photo).shape))
            elif name == "preprocess.json":
                config = PreprocessConfig.from_json(content[1:].decode("utf-8", "replace"))
                if max(*config.image_size, *config.scaled_size) < 1000:
                    image_CHW, _ = Preprocess(config)(photo)
                    assert image_CHW.isfinite().all() or min(config.std) < 1e-30 or max(map(abs, config.mean)) > 1e30
                said.append(config.resize)
            elif name == "model.json":
                said.append(config_from_json(content[1:].decode("utf-8", "replace")).architecture)
            else:
                loaded = load(place, **({} if place == ours else {"num_heads": 1}))
                if max(*loaded.preprocess.config.image_size, *loaded.preprocess.config.scaled_size) < 1000:
                    with refusals(said):
                        said.append(str(loaded.predict(photo).shape))
                said.append(loaded.config.architecture + str(loaded.labels is None))
        for left in ("engine.json", "preprocess.json", "model.json"):
            (ours / left).unlink(missing_ok=True)
        (ours / "config.json").write_bytes(good)
        for left in ("config.json", "preprocessor_config.json", "processor_config.json"):
            (theirs / left).unlink(missing_ok=True)
        return " ".join(said)

    seeds = [bytes([number]) + json.dumps(value).encode() for number, (_, _, value) in enumerate(whole)]
    return Target("model_folder", seeds, feed, is_json=lambda kind: True)


# The folder of a run


def run_folder() -> Target:
    from patchlight.batch.merge import _lines_by_photo
    from patchlight.batch.overrides import read_boxes, read_corrections, write_labels
    from patchlight.batch.rows import heat_of, read_rows
    from patchlight.batch.sequences import FrameStore
    from patchlight.batch.settings import CropSettings
    from patchlight.localizing.detector import Detector
    from patchlight.serve.review import _file_of, _shown
    from patchlight.weights.load import load

    folder = scratch()
    model = load(save_model(folder / "model"))
    detector = Detector.of(model, "auto")
    images = make_photos(folder / "photos", 3)
    bursts, whole = folder / "bursts", folder / "whole"
    run_crop(images, whole, model=model, workers=0)
    run_crop(images, bursts, CropSettings(burst=True, boxes_only=True), model=model, workers=0)
    outside = folder / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    run = folder / "run"
    rows = rows_of(whole)
    files = [str(path.absolute()) for path in images]
    correction = {"file": files[0], "decision": "subject", "boxes": [[1, 2, 30, 40]], "group": "animal", "label": "x"}
    detections = [{"category": "1", "conf": 0.9, "bbox": [0.1, 0.1, 0.5, 0.5]}]
    boxes = {
        "info": {"detector_metadata": {"typical_detection_threshold": 0.2, "conservative_detection_threshold": 0.1}},
        "detection_categories": {"1": "animal", "2": "person"},
        "images": [{"file": "000.jpg", "detections": detections * 2}, {"file": "a\\b.jpg", "failure": "x"}],
    }
    names = (
        ".run/journal.jsonl",
        "results.jsonl",
        "corrections.jsonl",
        ".run/run.json",
        ".run/given.json",
        ".run/finished.json",
        "summary.json",
        ".run/named.json",
        "boxes.json",
        "looks.jsonl",
    )

    def original(name: str) -> bytes:
        made = {
            "corrections.jsonl": lambda: "\n".join(map(json.dumps, (correction, {"file": files[1], "undone": True}))),
            "boxes.json": lambda: json.dumps(boxes),
            "looks.jsonl": lambda: (bursts / ".run" / "looks.jsonl").read_text(),
            ".run/named.json": lambda: json.dumps({"files": files}),
        }
        content = made[name]().encode() if name in made else (whole / name).read_bytes()
        return json.dumps(json.loads(content)).encode() if name.endswith(".json") else content

    def feed(content: bytes) -> str:
        name, said = names[(content or b"\0")[0] % len(names)], list[str]()
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        path = run / name
        path.write_bytes(content[1:])
        with refusals(said):
            if name == "boxes.json":
                for each in read_boxes(str(path), "/base", 5).values():
                    for row in rows:
                        json.dumps(each.applied(row))
                said.append("boxes")
            elif name == "looks.jsonl":
                store = FrameStore(path)
                try:
                    for file in store.entries:
                        with refusals(said):
                            store.look(file, detector)
                            said.append("seen")
                finally:
                    store.close()
            elif name == "results.jsonl":
                for number, row in enumerate(read_rows(path)):
                    if row["status"] == "ok":
                        _file_of(row)
                        _shown(number, row, corrected=False)
                        if row["heat"]:
                            heat_of(row)
            elif name == "corrections.jsonl":
                said.append(str(len(read_corrections(run))))
                with refusals(said):
                    write_labels(run)
                with refusals(said):
                    _lines_by_photo(path)
        if name not in ("boxes.json", "looks.jsonl"):
            with refusals(said):
                run_crop(images, run, model=model, workers=0, report=False, thumbs=False, prune=True)
                assert [row["path"] for row in rows_of(run)] == [row["path"] for row in rows], "lost or doubled"
                said.append("resumed")
            if said[-1:] == ["resumed"] and (content[1:4] or b"x")[0] % 4 == 0:  # and begun anew, which removes files
                with refusals(said):
                    run_crop(images, run, model=model, workers=0, report=False, thumbs=False, overwrite=True)
                    assert rows_of(run) == rows or name == "corrections.jsonl", "begun anew, and other rows"
        assert (outside / "kept").read_text() == "kept", "a file outside was touched"
        assert sorted(path.name for path in images) == sorted(path.name for path in (folder / "photos").iterdir())
        return " ".join(said)

    seeds = [bytes([number]) + original(name).strip() + b"\n" for number, name in enumerate(names)]
    words = (b"../outside/kept", str(outside / "kept").encode(), b"../photos/000.jpg")
    return Target("run_folder", seeds, feed, is_json=lambda kind: True, words=words)


# Sets of photos, tables


def training_set() -> Target:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from patchlight.batch.tables import read_features
    from patchlight.config import PreprocessConfig
    from patchlight.images.containers import members, read_elsewhere
    from patchlight.images.decode import ImageError, decode
    from patchlight.remote import Unreachable
    from patchlight.training.checkpoint import _read_index
    from patchlight.training.config import DataConfig, TrainConfig
    from patchlight.training.run_folder import RunFolder
    from patchlight.training.sources import open_dataset

    folder = scratch()
    make_photos(folder, 2)
    Image.new("L", (8, 8), 255).save(folder / "mask.png")
    photo = (folder / "000.jpg").read_bytes()[:400] + b"\xff\xd9"

    def tar(kind: int) -> bytes:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=kind) as archive:
            for name, content in (
                ("a/1.jpg", photo),
                ("a/1.cls", b"7"),
                ("é" * 60 + "/2.jpg", photo),
                ("2.json", b'{"label": "x"}'),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return file.getvalue().rstrip(b"\0") + bytes(1024)

    table = pa.table({"image": [{"bytes": photo, "path": None}, {"bytes": None, "path": "000.jpg"}], "label": [1, 2]})
    parquet, arrow, stream, features, npz = (io.BytesIO() for _ in range(5))
    pq.write_table(table, parquet)
    with pa.ipc.new_file(arrow, table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    column = pa.array([[0.5, 1.0], [2.0, 3.0]], pa.list_(pa.float32(), 2))
    about = {b"patchlight": json.dumps({"shape": [2], "features": "pooled", "model": "x"}).encode()}
    pq.write_table(
        pa.table({"path": ["a", "b"], "status": ["ok", "error"], "features": column}).replace_schema_metadata(about),
        features,
    )
    np.savez(npz, path=np.array(["a"]), status=np.array(["ok"]), features=np.zeros((1, 2)), about=np.array("{}"))
    rows = 'file,label,x0,y0,x1,y1,boxes,mask\n000.jpg,a,1,2,30,40,,\n001.jpg,12,,,,,"[[1,2,3,4]]",mask.png\n'
    settings = TrainConfig(
        model=tiny_vit().config, data=DataConfig(train="x"), preprocess=PreprocessConfig(image_size=32)
    )
    line = {"step": 1, "file": "step-00000001.safetensors", "sha256": "0" * 64, "bytes": 10}
    kinds = (
        "x.csv",
        "x.tar",
        "x.parquet",
        "x.arrow",
        "f.parquet",
        "f.npz",
        "checkpoints.json",
        "metrics.jsonl",
        "config.json",
    )
    seeds = [
        b"\0" + rows.encode(),
        b"\0" + rows.replace(",", ";").encode("utf-8-sig"),
        b"\1" + tar(tarfile.GNU_FORMAT),
        b"\1" + tar(tarfile.PAX_FORMAT),
        b"\2" + parquet.getvalue(),
        b"\3" + arrow.getvalue(),
        b"\3" + stream.getvalue(),
        b"\4" + features.getvalue(),
        b"\5" + npz.getvalue(),
        b"\6" + json.dumps([line]).encode(),
        b"\7" + json.dumps({"step": 1, "loss": 0.5}).encode(),
        b"\x08" + json.dumps(settings.to_dict()).encode(),
    ]

    def feed(content: bytes) -> str:
        name, said = kinds[(content or b"\0")[0] % len(kinds)], list[str]()
        path = folder / name
        path.write_bytes(content[1:])
        with refusals(said):
            if name in ("x.csv", "x.tar"):
                for labelled in (True, False) if name == "x.tar" else (True,):
                    dataset = open_dataset(path, labelled=labelled)
                    said.append(f"{len(dataset.classes)} classes {len(dataset.notes)} notes")
                    for each in range(min(len(dataset), 3)):
                        with refusals(said):
                            dataset.read(each)
                    dataset.fingerprint()
        if name in ("x.tar", "x.parquet", "x.arrow"):
            with refusals(said):
                for number, (member, _) in enumerate(members(str(path), name)):
                    if number < 4:
                        with refusals(said), contextlib.suppress(Unreachable):
                            read_elsewhere(f"{path}{member}")
                        with contextlib.suppress(ImageError):
                            decode(f"{path}{member}", max_pixels=MOST_PIXELS)
                said.append(f"{number} members")
        with refusals(said):
            if name in ("f.parquet", "f.npz"):
                said.append(str(read_features(path).features_ND.shape))
            elif name == "checkpoints.json":
                said.append(str(len(_read_index(folder))))
            elif name == "metrics.jsonl":
                said.append(str(len(RunFolder(folder).rows())))
            elif name == "config.json":
                said.append(str(len(asdict(TrainConfig.from_json(content[1:].decode("utf-8", "replace"))))))
        return " ".join(said)

    words = (b"ustar", b"000.jpg", b"\0" * 512, b"label", b'"[[1,2,3,4]]"', b"PAR1", b"\x80\0\0\0", b"9" * 5000)

    def repaired(content: bytes) -> bytes:
        repairs = {1: _tar_repaired, 5: _zip_repaired}
        return repairs.get((content or b"\0")[0] % len(kinds), bytes)(content)

    return Target(
        "training_set",
        seeds,
        feed,
        is_json=lambda kind: kind % len(kinds) in (6, 7, 8),
        is_text=lambda kind: kind % len(kinds) == 0,
        repair=repaired,
        words=words,
    )


# HTTP


def http() -> Target:
    from starlette.testclient import TestClient

    from patchlight.serve.app import make_app
    from patchlight.serve.engine import Engine
    from patchlight.serve.guard import TOKEN_HEADER, AccessPolicy
    from patchlight.serve.limits import Limits
    from patchlight.weights.save import save

    model = scratch() / "tiny"
    save(tiny_vit(num_registers=2), model, labels=["a", "b", "c", "d", "<e>"])
    log: list[Any] = []
    access = AccessPolicy(token="known", hosts=frozenset({"testserver"}))
    limits = Limits(pixels=MOST_PIXELS)
    engine = Engine((str(model),), limits=limits)
    app = make_app(engine, access, log.append, threads=1)
    client = TestClient(app, raise_server_exceptions=False, headers={TOKEN_HEADER: "known"})
    client.__enter__()
    while not engine.ready:
        assert engine.failure is None
        client.get("/readyz")
    jpeg = photo_seeds()[1]

    def form(content: bytes, name: str = "x.jpg") -> bytes:
        about = f'Content-Disposition: form-data; name="photo"; filename="{name}"'
        head = f"--x\r\n{about}\r\nContent-Type: image/jpeg\r\n\r\n"
        return head.encode() + content + b"\r\n--x--\r\n"

    multipart = {"content-type": "multipart/form-data; boundary=x"}
    photo = client.post("/api/v1/photos", content=form(jpeg), headers=multipart).json()["id"]
    name = engine.models[0].name
    image = {"name": "image", "datatype": "FP32", "shape": [1, 3, 32, 32], "data": [0.5] * (3 * 32 * 32)}
    tiny = {"name": "image", "datatype": "FP32", "shape": [1, 3, 2, 2], "data": [0.5] * 12}
    bytes_in = {"name": "photo", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(jpeg).decode()]}
    packed = {"name": "photo", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(jpeg) + 4}}
    order = {"photo": photo, "box": [1, 1, 9, 9], "margin": 0.1, "aspect": "1:1"}
    head = json.dumps({"inputs": [packed], "outputs": [{"name": "logits"}], "id": "7"}).encode()
    queries = (
        f"/api/v1/photos/{photo}/localize?model=0&method=auto&subjects=1",
        f"/api/v1/photos/{photo}/attention?model=0&layer=-1&query=cls",
        f"/api/v1/photos/{photo}/heads?layer=0&query=1,1",
        f"/api/v1/photos/{photo}/crop?left=1&top=1&right=9&bottom=9&margin=0.1&aspect=4:3",
        f"/api/v1/photos/{photo}/region?left=1&top=1&right=9&bottom=9",
        f"/api/v1/photos/{photo}/preview?side=64",
        f"/api/v1/photos/{photo}/classify?top=3",
        f"/api/v1/photos/{photo}/shuffle?seed=1",
        "/api/v1/costs?model=0&image_size=64",
        f"/v2/models/{name}",
        "/web/main.js?x=%00",
    )

    def ask(kind: int, content: bytes) -> Any:
        match kind:
            case 0:
                return client.post("/api/v1/crops", content=content, headers={"content-type": "application/json"})
            case 1:
                return client.post(f"/v2/models/{name}/infer", content=content)
            case 2:
                length = {"inference-header-content-length": str(int.from_bytes(content[:2], "big"))}
                return client.post(f"/v2/models/{name}/infer", content=content[2:], headers=length)
            case 3:
                return client.post("/api/v1/photos", content=content, headers=multipart)
            case 4:
                outputs = ("boxes", "classes", "features")[len(content) % 3]
                return client.post(f"/api/v1/predict?outputs={outputs}", content=content, headers=multipart)
            case _:
                path = "/" + "".join(chr(byte) for byte in content if 32 < byte < 127).lstrip("/")
                return client.request("GET", "http://testserver" + path)

    def feed(content: bytes) -> str:
        kind = (content or b"\0")[0] % 6
        log.clear()
        try:
            answer = ask(kind, content[1:])
        except Exception as error:
            if type(error).__module__.startswith(("httpx", "starlette.testclient", "anyio")):
                return f"not sent: {type(error).__name__}"
            raise
        failed = [line["error"] for line in log if "error" in line]
        if failed or answer.status_code in (500, 504):
            raise type(re.sub(r"\W+", "_", str(failed or answer.text)[:90]), (Exception,), {})(str(failed))
        if answer.status_code == 201:
            made = answer.json()["id"]
            for path in ("localize", "preview", "crop?left=0&top=0&right=5&bottom=5", "attention", "classify"):
                again = client.get(f"/api/v1/photos/{made}/{path}")
                assert again.status_code in (200, 422), f"{path}: {again.status_code} {again.text[:300]}"
            client.request("DELETE", f"/api/v1/photos/{made}")
        if answer.status_code >= 400:
            assert answer.json()["error"], "a refusal without a reason"
            return f"{answer.status_code} {answer.text[:100]}"
        return f"{answer.status_code} {answer.headers.get('content-type')}"

    seeds = [
        b"\0" + json.dumps({"crops": [order, order]}).encode(),
        b"\1"
        + json.dumps({"inputs": [tiny], "outputs": [{"name": "logits"}, {"name": "features"}], "id": "7"}).encode(),
        b"\1" + json.dumps({"inputs": [image], "outputs": [{"name": "probabilities"}]}).encode(),
        b"\1" + json.dumps({"inputs": [bytes_in]}).encode(),
        b"\2" + struct.pack(">H", len(head)) + head + struct.pack("<I", len(jpeg)) + jpeg,
        b"\3" + form(jpeg),
        b"\3" + form(photo_seeds()[7], "%22é.png"),
        b"\4" + form(jpeg) + form(photo_seeds()[5]),
        *(b"\5" + query.encode() for query in queries),
    ]
    words = (b'filename="', b"\r\n--x", b"&model=9", b"method=", b"nan", b"1e400", b"%00", b"%ff", b'"data":', b"=-1")
    return Target("http", seeds, feed, is_json=lambda kind: kind % 6 in (0, 1), words=words)


TARGETS: dict[str, Callable[[], Target]] = {
    "photos": photos,
    "checkpoint": checkpoint,
    "model_folder": model_folder,
    "run_folder": run_folder,
    "training_set": training_set,
    "http": http,
}
