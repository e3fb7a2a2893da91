"""Results are drawn where they are, and the picture itself stays as it was."""

import numpy as np
import pytest

from kestrel.media import annotate

GREY = np.full((100, 200, 3), 128, np.uint8)


def changed(image):
    return (np.asarray(image) != 128).any(axis=-1)


def test_box_is_drawn_on_its_edges_and_not_inside():
    pixels = GREY.copy()
    drawn = changed(annotate(pixels, boxes=[{"x_min": 0.25, "y_min": 0.2, "x_max": 0.75, "y_max": 0.8}]))
    assert drawn[20, 50]
    assert drawn[79, 149]
    assert not drawn[50, 100]
    assert not drawn[5, 5]
    assert (pixels == 128).all()


def test_point_is_drawn_where_it_is():
    drawn = changed(annotate(GREY, points=[{"x": 0.5, "y": 0.5}]))
    rows, columns = np.nonzero(drawn)
    assert abs(rows.mean() - 49.5) < 1
    assert abs(columns.mean() - 99.5) < 1


def test_equal_labels_share_a_colour_and_others_differ():
    points = [{"x": x, "y": 0.5} for x in (0.2, 0.5, 0.8)]
    image = annotate(GREY, points=points, labels=["cat", "dog", "cat"])
    colours = [image.getpixel((round(point["x"] * 199), 50)) for point in points]
    assert colours[0] == colours[2] != colours[1]


@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 2, 3), (2, 400, 3)])
def test_corners_and_tiny_pictures_are_drawn_inside(shape):
    image = annotate(
        np.zeros(shape, np.uint8),
        boxes=[{"x_min": 0.9, "y_min": -0.1, "x_max": 0.1, "y_max": 1.2}],
        points=[{"x": 1.0, "y": 1.0}],
        labels=["a long label", "another"],
    )
    assert image.size == (shape[1], shape[0])
