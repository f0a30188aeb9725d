"""Predicts times of primitives that were not measured from those that were, by xgboost.

Trees predict the factor by which a primitive is slower than its bound
(`primitive_selection.profile.bound_ns`). The bound contains the size of the layer, so that a factor learned
on one layer is useful for another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from pimflow.core.kernel import ConvGeometry
from pimflow.errors import ProfileError
from pimflow.primitive_selection.profile import Profile, applicable_primitives, bound_ns, macs
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.families import FAMILIES
from pimflow.primitives.layer import LAYOUTS, input_bytes

Key = tuple[str, ConvGeometry]
MIN_MEASURED = 30  # with fewer measured times, trees would only repeat them
TREES = 300
PARAMETERS = {"max_depth": 6, "eta": 0.08, "subsample": 0.9, "min_child_weight": 2, "nthread": 1, "seed": 0}


def features(name: str, layer: ConvGeometry) -> list[float]:
    """Features of a primitive and a layer, from which the factor is predicted."""
    primitive = PRIMITIVES[name]
    extents = primitive.extents(layer)
    families = [float(primitive.family == family) for family in FAMILIES]
    layouts = [float(primitive.layout == layout) for layout in LAYOUTS]
    sizes = (layer.h, layer.w, layer.c, layer.oc, layer.kh, layer.kw, layer.oh, layer.ow, layer.pixels)
    amounts = (
        layer.macs,
        macs(primitive, layer),
        input_bytes(layer),
        primitive.filter_bytes(layer),
        primitive.workspace_bytes(layer),
        extents.pixels,
        extents.channels,
    )
    return [
        *families,
        *layouts,
        *map(float, (primitive.tile, primitive.directions, primitive.accumulating)),
        *map(float, (primitive.places, primitive.lanes, extents.places, extents.lanes, max(layer.stride))),
        *(math.log1p(value) for value in (*sizes, *amounts)),
        extents.channels / layer.oc,
        macs(primitive, layer) / max(1, layer.macs),
    ]


def predict_ns(profile: Profile, layers: Iterable[ConvGeometry]) -> dict[Key, float]:
    """Predict times of the primitives for `layers` that have none in `profile` and did not fail.

    Raises
    ------
    ProfileError
        If it has fewer than `MIN_MEASURED` times to learn from.
    """
    import xgboost  # takes a second, so it is imported only where it is needed

    measured_ns = dict(sorted(profile.times_ns.items(), key=repr))  # trees depend on the order of rows
    if len(measured_ns) < MIN_MEASURED:
        raise ProfileError(
            f"{len(measured_ns)} measured times are too few to predict others from; {MIN_MEASURED} are "
            "needed: measure "
            "more (--measure)"
        )
    missing = [(p.name, layer) for layer in dict.fromkeys(layers) for p in applicable_primitives(layer)]
    missing = [key for key in missing if key not in measured_ns and key not in profile.failed]
    if not missing:
        return {}
    factors = [math.log(max(ns, 1.0) / _bound(key)) for key, ns in measured_ns.items()]
    data = xgboost.DMatrix(np.array([features(*key) for key in measured_ns]), label=np.array(factors))
    trees = xgboost.train(PARAMETERS, data, num_boost_round=TREES)
    predicted = trees.predict(xgboost.DMatrix(np.array([features(*key) for key in missing])))
    return {key: _bound(key) * math.exp(float(factor)) for key, factor in zip(missing, predicted)}


def _bound(key: Key) -> float:
    return bound_ns(PRIMITIVES[key[0]], key[1])
