"""Conversion of decoded video frames to upright RGB pictures of a given shape, or of the video's."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.sides import Sides, height_and_width

from .images import ChooseBox, center_box, check_aspect_ratio

Picture = npt.NDArray[np.uint8]


class Frame(NamedTuple):
    """A decoded frame (av.VideoFrame), its time and its duration (0 if unknown), in ticks of its stream."""

    image: Any
    pts: float
    duration: float


class FrameConverter:
    """Frame -> upright RGB uint8. Transparent pixels are blended with white. One converter serves all frames of a clip,
    because FFmpeg allocates megabytes for each converter.

    Args:
        image_size: The result is (height, width, 3): the centre crop, or the part that `choose_box` returns.
        pixel_width: Width over height of a pixel of the video.
        is_opaque: Whether alpha is ignored.
        multiple: Without `choose_box`: the result is (height, width, 3) in the aspect ratio of the video (see
            `check_aspect_ratio`), resized so that the shorter side is that of `image_size`, and cropped to multiples of
            this number.
    """

    def __init__(
        self,
        image_size: Sides,
        pixel_width: float,
        choose_box: ChooseBox | None = None,
        is_opaque: bool = False,
        multiple: int | None = None,
    ) -> None:
        from av.video.reformatter import VideoReformatter

        self._image_size, self._pixel_width, self._choose_box = height_and_width(image_size), pixel_width, choose_box
        self._is_opaque, self._multiple = is_opaque, multiple
        self._resize, self._to_rgba = VideoReformatter().reformat, VideoReformatter().reformat

    def __call__(self, frame: Frame) -> Picture:
        image = frame.image
        if image.format.has_palette or any(component.is_alpha for component in image.format.components):
            image = image if self._is_opaque else self._blend_with_white(image)
        sides = image.width * self._pixel_width, image.height
        if self._multiple:
            check_aspect_ratio(*sides)
        out_height, out_width = self._image_size
        if self._multiple:
            out_height = out_width = min(self._image_size)
        elif out_height != out_width and _turn_upright(np.empty((1, 2)), image).shape == (2, 1):
            out_height, out_width = out_width, out_height
        if self._choose_box:
            box = self._choose_box(max(1, round(sides[0])), max(1, round(sides[1])), out_width, out_height)
        else:
            box = center_box(*sides, out_width, out_height)
        width = max(out_width, round(sides[0] * out_width / box.width))
        height = max(out_height, round(sides[1] * out_height / box.height))
        method = "AREA" if box.width > out_width else "BICUBIC"
        resized = self._resize(image, width, height, "gbrp", interpolation=method, threads=1)
        pixels = resized.to_ndarray()
        if self._choose_box:
            top = min(round(box.top * out_height / box.height), height - out_height)
            left = min(round(box.left * out_width / box.width), width - out_width)
            pixels = pixels[top : top + out_height, left : left + out_width]
        picture: Picture = _turn_upright(pixels, frame.image)
        rows, columns = self._image_size
        if self._multiple:
            rows, columns = (side // self._multiple * self._multiple for side in picture.shape[:2])
        top, left = (picture.shape[0] - rows) // 2, (picture.shape[1] - columns) // 2
        return picture[top : top + rows, left : left + columns]

    def _blend_with_white(self, image: Any) -> Any:
        """A frame blended with white. It has to be blended before it is resized: otherwise the colours of transparent
        pixels would leak into their neighbours."""
        import av

        pixels = self._to_rgba(image, format="rgba", threads=1).to_ndarray()
        if pixels[..., 3].min() == 255:
            return image
        colour, alpha = pixels[..., :3].astype(np.uint16), pixels[..., 3:].astype(np.uint16)
        blended = (colour * alpha + 255 * (255 - alpha) + 127) // 255
        return av.VideoFrame.from_ndarray(blended.astype(np.uint8), format="rgb24")


def _turn_upright(pixels: Any, image: Any) -> Any:
    """The pixels of a frame, rotated and mirrored by its display matrix: (x, y) -> (a x + c y, b x + d y)."""
    try:
        matrix = image.side_data.get("DISPLAYMATRIX")
    except ValueError:  # PyAV raises if the frame has side data of a kind that it does not know
        return np.rot90(pixels, image.rotation // 90)
    if matrix is None:
        return pixels
    (a, b), (c, d) = np.frombuffer(matrix, np.int32).reshape(3, 3)[:2, :2].tolist()
    if abs(a * d) < abs(b * c):
        pixels, a, d = pixels.swapaxes(0, 1), c, b
    return pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
