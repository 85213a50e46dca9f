"""Every foreign model, by name."""

from __future__ import annotations

from tests.capture.foreign import denoisers, text, vision_and_audio
from tests.capture.foreign.model import Foreign

MODELS: dict[str, Foreign] = {
    model.name: model for model in (*text.MODELS, *vision_and_audio.MODELS, *denoisers.MODELS)
}
