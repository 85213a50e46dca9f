"""Chart library of the report: Vega, Vega-Lite and vega-embed, bundled by vl-convert-python."""

from __future__ import annotations

import functools
import importlib.util

from capture.errors import MissingPackage

ONCE_THERE = "window.vegaEmbed = vegaEmbed; window.dispatchEvent(new Event('charts'));"
"""Code that the browser runs after the bundle."""


def require() -> None:
    """Check that vl-convert-python is installed.

    Raises:
        MissingPackage: vl-convert-python is not installed.
    """
    if importlib.util.find_spec("vl_convert") is None:
        raise MissingPackage(
            "reports and charts require vl-convert-python: pip install 'attention-replay[report]'"
        )


@functools.cache  # making the bundle takes a second
def bundle() -> str:
    """Return the library as a JavaScript module of about 0.9 MB, which needs no network.

    Raises:
        MissingPackage: vl-convert-python is not installed.
    """
    require()
    import vl_convert

    text: str = vl_convert.javascript_bundle(ONCE_THERE)
    return text
