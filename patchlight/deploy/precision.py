"""Exported models in fewer bits, by the engines' own tools."""

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from patchlight.deploy.engines import openvino_core

Inputs = Callable[[], Iterator[Any]]
"""Makes inputs of the model from photos, for int8 to learn its ranges from."""


def quantize_onnx(path: Path, inputs: Inputs) -> None:
    """The ONNX model at `path` in int8, in its place. What goes in and comes out stays as it was."""
    import onnx
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._inputs = inputs()

        def get_next(self) -> dict[str, Any] | None:
            image = next(self._inputs, None)
            return None if image is None else {"image": image}

    model = onnx.load(path)
    # The exporter's notes on shapes hold for one size, and the quantiser would believe them.
    del model.graph.value_info[:]
    products = [node for node in model.graph.node if node.op_type in ("Conv", "MatMul", "Gemm")]
    weights = {tensor.name for tensor in model.graph.initializer}
    layers = [node for node in products if any(name in weights for name in node.input)]
    # The first layer sees the pixels and the last one decides: they stay whole, for they cost least and matter most.
    # Products of two activations (the attention's) are few and sensitive, and so are those of positions in float64.
    kept = {layers[0].name, layers[-1].name} | {node.name for node in products if node not in layers}
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "model.onnx"
        onnx.save(model, plain)
        quantization.quantize_static(
            plain,
            path,
            Reader(),
            op_types_to_quantize=["MatMul", "Gemm"],
            nodes_to_exclude=sorted(kept),
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )


def _kept_whole(model: Any) -> list[str]:
    """As in ONNX: the first and the last layer, and products of two activations."""
    products = [each for each in model.get_ordered_ops() if each.get_type_name() in ("Convolution", "MatMul")]

    def has_weights(product: Any) -> bool:
        source = product.input_value(1).get_node()
        while source.get_type_name() in ("Convert", "Transpose", "Reshape") and source.get_input_size():
            source = source.input_value(0).get_node()
        return bool(source.get_type_name() == "Constant")

    layers = [each for each in products if has_weights(each)]
    kept = {each.get_friendly_name() for each in (layers[0], layers[-1])}
    return sorted(kept | {each.get_friendly_name() for each in products if not has_weights(each)})


def as_openvino(precision: str, onnx_path: Path, path: Path, inputs: Inputs) -> None:
    """OpenVINO's form of an ONNX model. Half precision is chosen when it is run; float16 also halves the file."""
    import openvino

    model = openvino_core().read_model(onnx_path)
    if precision == "int8":
        import nncf

        images = list(inputs())
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # its progress bars
            model = nncf.quantize(
                model,
                nncf.Dataset(images, lambda image: [image]),
                subset_size=len(images),
                ignored_scope=nncf.IgnoredScope(names=_kept_whole(model)),
                model_type=nncf.ModelType.TRANSFORMER,
                preset=nncf.QuantizationPreset.MIXED,
                # SmoothQuant takes outliers of activations into the weights. Of models this small it made int8 worse:
                # of the default one the cosine of the logits was 0.965 with it and is 0.996 without.
                advanced_parameters=nncf.AdvancedQuantizationParameters(
                    smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=-1)
                ),
            )
    openvino.save_model(model, path, compress_to_fp16=precision == "float16")
