"""A picture of the load of all experts: a heat map, layers by experts.

Shapes: L layers, E logical experts.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from cluster.api.load import LoadView
from configs.errors import ConfigError

mpl.use("Agg")


def draw_load(view: LoadView, path: Path) -> None:
    """Draw the load at the last quantile: as it is, and with each layer's experts sorted.

    Raises:
        ConfigError: The file cannot be written, or its ending is of no picture.
    """
    load_LE = np.stack([one.picks_QE[-1] for one in view.layers if one.picks_QE is not None])
    # Over the layer's mean, so that layers compare.
    ratio_LE = load_LE / np.maximum(load_LE.mean(axis=1, keepdims=True), 1e-9)
    figure = Figure(figsize=(12, 2.2 + 0.09 * len(load_LE) * 2), layout="constrained")
    top, bottom = figure.subplots(2, 1)
    brightest = float(np.quantile(ratio_LE, 0.999))
    for axes, values in ((top, ratio_LE), (bottom, -np.sort(-ratio_LE, axis=1))):
        image = axes.imshow(
            values, aspect="auto", interpolation="nearest", cmap="magma", vmin=0, vmax=brightest
        )
        layers = [one.layer for one in view.layers]
        ticks = np.unique(np.linspace(0, len(layers) - 1, min(12, len(layers))).astype(int))
        axes.set_yticks(ticks, [str(layers[at]) for at in ticks])
        axes.set_ylabel("layer")
    top.set_xlabel("expert")
    bottom.set_xlabel("experts of each layer, most loaded first")
    top.set_title(
        f"Picks of each expert at quantile {view.quantiles[-1]:g} over the mean of its layer; "
        f"{view.num_buckets} buckets of {view.bucket_s:g} s",
        fontsize=10,
    )
    figure.colorbar(image, ax=[top, bottom], label="times the layer's mean")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be written: {exc}") from exc
