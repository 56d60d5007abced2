"""Conversion of decoded video frames to upright RGB pictures, square or in the aspect ratio of the video."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .images import ChooseSquare, check_aspect_ratio

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
        side: The result is (side, side, 3): the centre crop, or the square that `choose_square` returns.
        pixel_width: Width over height of a pixel of the video.
        is_opaque: Whether alpha is ignored.
        multiple: Without `choose_square`: the result is (height, width, 3) in the aspect ratio of the video (see
            `check_aspect_ratio`), resized so that the shorter side is `side`, and cropped to multiples of this number.
    """

    def __init__(
        self,
        side: int,
        pixel_width: float,
        choose_square: ChooseSquare | None = None,
        is_opaque: bool = False,
        multiple: int | None = None,
    ) -> None:
        from av.video.reformatter import VideoReformatter

        self._side, self._pixel_width, self._choose_square = side, pixel_width, choose_square
        self._is_opaque, self._multiple = is_opaque, multiple
        self._resize, self._to_rgba = VideoReformatter().reformat, VideoReformatter().reformat

    def __call__(self, frame: Frame) -> Picture:
        image = frame.image
        if image.format.has_palette or any(component.is_alpha for component in image.format.components):
            image = image if self._is_opaque else self._blend_with_white(image)
        sides = image.width * self._pixel_width, image.height
        if self._multiple:
            check_aspect_ratio(*sides)
        square = self._choose_square(*(max(1, round(side)) for side in sides)) if self._choose_square else None
        shorter = square.side if square else min(sides)
        width, height = (max(self._side, round(side * self._side / shorter)) for side in sides)
        method = "AREA" if shorter > self._side else "BICUBIC"
        resized = self._resize(image, width, height, "gbrp", interpolation=method, threads=1)
        pixels = resized.to_ndarray()
        if square:
            origins = (round(start * self._side / shorter) for start in (square.top, square.left))
            top, left = (min(start, length - self._side) for start, length in zip(origins, pixels.shape, strict=False))
            pixels = pixels[top : top + self._side, left : left + self._side]
        picture: Picture = _turn_upright(pixels, frame.image)
        multiple = self._multiple
        rows, columns = (side // multiple * multiple if multiple else self._side for side in picture.shape[:2])
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
