"""Pictures of sixteen signs, drawn by a counter-based generator, for the trained networks of the zoo.

A sign is four strokes between points of a grid. A picture has one sign, rotated, shifted, scaled and bent, in
a random colour on another, two stray strokes, and noise. The same seed gives the same pictures on every
machine, up to the last bit of a sine.
"""

from __future__ import annotations

import numpy as np

from pimflow.zoo.weights import uniform

CLASSES = 16
SIZE = 24  # pixels of a side
STROKES, STRAY = 4, 2
GRID = 4  # points of a side of the grid
NOISE = 0.15  # standard deviation; colours are in [-1, 1]
TRAINING, HELD_OUT = 1, 2  # seeds: pictures for training, and pictures for measuring accuracy
_AT_ONCE = 256  # pictures that are drawn together: few enough for a cache


def pictures(count: int, seed: int = HELD_OUT) -> tuple[np.ndarray, np.ndarray]:
    """Draw `count` pictures, of the classes in turn.

    Parameters
    ----------
    seed : int
        0 to 2**64 - 1; `HELD_OUT` for pictures that the network has not seen.

    Returns
    -------
    ndarray, [count, 3, SIZE, SIZE]
        fp32, mean 0, variance about 1.
    ndarray, [count]
        int64, classes.
    """
    labels = np.arange(count) % CLASSES
    return _draw(count, seed)[0], labels


def masks(count: int, seed: int = HELD_OUT) -> tuple[np.ndarray, np.ndarray]:
    """The pictures of `pictures`, and which of their pixels belong to the sign.

    Returns
    -------
    ndarray, [count, 3, SIZE, SIZE]
        fp32, mean 0, variance about 1.
    ndarray, [count, SIZE, SIZE]
        int64: 1 where the sign covers half of the pixel or more, else 0.
    """
    images, coverage = _draw(count, seed)
    return images, (coverage >= 0.5).astype(np.int64)


def _draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures, [count, 3, SIZE, SIZE], and the coverage of their pixels by signs, [count, SIZE, SIZE]."""
    labels = np.arange(count) % CLASSES
    numbers = uniform("glyphs", count * 48, seed).astype(np.float64).reshape(count, 48)
    noise = uniform("glyph noise", 3 * count * 3 * SIZE**2, seed).reshape(3, count, 3, SIZE, SIZE)
    images = noise.sum(axis=0, dtype=np.float32) * np.float32(NOISE)
    coverage = np.empty((count, SIZE, SIZE), np.float32)
    for begin in range(0, count, _AT_ONCE):
        part = slice(begin, begin + _AT_ONCE)
        colours, coverage[part] = _colours(numbers[part], _signs()[labels[part]])
        images[part] += colours
    return images, coverage


def _signs() -> np.ndarray:
    """Strokes of each class, [CLASSES, STROKES, 2 ends, 2 coordinates], in [-1, 1]."""
    points = (uniform("signs", CLASSES * STROKES * 4, 0).astype(np.float64) + 1) / 2 * GRID
    return np.floor(points).reshape(CLASSES, STROKES, 2, 2) / (GRID - 1) * 2 - 1


def _colours(numbers: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pictures without noise, and the coverage by signs, from 48 random numbers in [-1, 1) for each."""
    stroke_bends = numbers[:, : STROKES * 4].reshape(-1, STROKES, 2, 2)
    stray_strokes = numbers[:, 16:24].reshape(-1, STRAY, 2, 2)
    turn, scale, shift, width = numbers[:, 24], numbers[:, 25], numbers[:, 26:28], numbers[:, 28]
    angle = 0.45 * turn
    rotation = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], -1).reshape(-1, 2, 2)
    bent = (signs + 0.18 * stroke_bends) * (0.62 + 0.16 * scale)[:, None, None, None]
    rotated = np.einsum("nsep,nqp->nseq", bent, rotation) + 0.18 * shift[:, None, None]
    reach = (0.055 + 0.02 * width)[:, None, None]
    ground, ink, stray_ink = (numbers[:, first : first + 3, None, None] for first in (30, 33, 36))
    sign, stray = _coverage(rotated, reach), _coverage(stray_strokes, reach)
    ink = np.where(np.abs(ink - ground) < 0.5, ground + np.where(ink < ground, -0.5, 0.5), ink)
    background = ground + (stray_ink - ground) * stray[:, None]
    return (background + (ink - background) * sign[:, None]).astype(np.float32), sign


def _coverage(strokes: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """The share of each pixel that strokes cover, [n, SIZE, SIZE]; `reach` is half the width of a stroke."""
    pixel_centres = (np.arange(SIZE) + 0.5) / SIZE * 2 - 1
    coverage = np.zeros((len(strokes), SIZE, SIZE))
    for number in range(strokes.shape[1]):
        begin, along = strokes[:, number, 0], strokes[:, number, 1] - strokes[:, number, 0]
        x, y = (coordinate[:, None, None] for coordinate in begin.T)
        dx, dy = (coordinate[:, None, None] for coordinate in along.T)
        right, down = pixel_centres[None, None, :] - x, pixel_centres[None, :, None] - y
        share = np.clip((right * dx + down * dy) / np.maximum(dx * dx + dy * dy, 1e-9), 0, 1)
        distance = np.hypot(right - share * dx, down - share * dy)
        coverage = np.maximum(coverage, np.clip((reach - distance) * SIZE / 2 + 0.5, 0, 1))
    return coverage
