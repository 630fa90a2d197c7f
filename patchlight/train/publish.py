"""What a finished run leaves: a model that `patchlight.load` takes, its card and its curves."""

from patchlight.errors import PatchlightError
from patchlight.explain import plot
from patchlight.models.vit import ViT
from patchlight.train.card import training_card
from patchlight.train.config import TrainConfig
from patchlight.train.data import Dataset
from patchlight.train.evaluate import Evaluation
from patchlight.train.run_folder import RunFolder
from patchlight.weights.save import save


def publish(
    folder: RunFolder,
    model: ViT,
    config: TrainConfig,
    training: Dataset,
    result: Evaluation,
    seconds: float,
    hardware: str,
    notes: list[str],
) -> None:
    save(model, folder.path, preprocess=config.preprocess, labels=training.classes, overwrite=True)
    summary = result.summary() | {"photos": len(training), "validation_photos": result.photos}
    card = training_card(config, training.classes, summary, seconds, hardware, notes)
    folder.replace("README.md", card.encode())
    try:
        axes = plot.draw_curves(folder.rows())
        folder.replace("curves.png", plot.to_png(axes[0].figure))
    except PatchlightError:
        pass  # no matplotlib: the numbers are in metrics.jsonl
