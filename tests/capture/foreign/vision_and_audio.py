"""Vision and audio models from transformers."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

from tests.capture.foreign.model import NONE, Foreign, Run, encoded, generated
from tests.capture.foreign.text import BART, GROUPED, SIZES, generating

PIXELS = {"image_size": 16, "patch_size": 4, "num_channels": 3}
VISION = {**SIZES, **PIXELS}
WINDOWS = {**PIXELS, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
IMAGE_TOKEN = 63


def picture(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0))


def seeing(
    kind: str, config: dict[str, Any] = VISION, size: int = 16, auto: str = "AutoModel"
) -> Callable[[], tuple[Any, Run]]:
    """Return a function that builds an encoder and its run on two pictures."""

    def build() -> tuple[Any, Run]:
        torch.manual_seed(0)
        made = transformers.AutoConfig.for_model(kind, **config)
        model = getattr(transformers, auto).from_config(made).eval()
        return model, lambda: model(pixel_values=picture(2, 3, size, size)).to_tuple()

    return build


def clip() -> tuple[Any, Run]:
    torch.manual_seed(0)
    text = {**SIZES, "max_position_embeddings": 16, "eos_token_id": 9, "bos_token_id": 0}
    config = transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=16)
    model = transformers.CLIPModel(config).eval()
    ids = torch.tensor([[0, 5, 6, 7, 9], [0, 5, 9, 9, 9]])
    seen = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    pixels = picture(2, 3, 16, 16)
    return model, lambda: model(ids, pixels, attention_mask=seen).logits_per_image


def llava() -> tuple[Any, Run]:
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config={**VISION, "model_type": "clip_vision_model"},
        text_config={**GROUPED, "model_type": "llama", "eos_token_id": None},
        image_token_id=IMAGE_TOKEN,
        vision_feature_layer=-1,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[1] + [IMAGE_TOKEN] * 16 + [5, 6, 7]])
    pixels = picture(1, 3, 16, 16)
    mask = torch.ones_like(ids)
    return model, generating(model, input_ids=ids, attention_mask=mask, pixel_values=pixels)


def qwen2_vl() -> tuple[Any, Run]:
    torch.manual_seed(0)
    config = transformers.Qwen2VLConfig(
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "mlp_ratio": 1,
            "patch_size": 4,
            "temporal_patch_size": 1,
        },
        text_config={
            **GROUPED,
            "eos_token_id": None,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
        },
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=61,
        vision_end_token_id=62,
    )
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    # Each of two pictures has 4 × 4 patches; four patches make a token.
    ids = torch.tensor([[1, *([61] + [IMAGE_TOKEN] * 4 + [62]) * 2, 5, 6, 7]])
    return model, generating(
        model,
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == IMAGE_TOKEN).int(),
        pixel_values=picture(32, 3 * 1 * 4 * 4),
        image_grid_thw=torch.tensor([[1, 4, 4]] * 2),
    )


def sam() -> tuple[Any, Run]:
    torch.manual_seed(0)
    config = transformers.SamConfig(
        vision_config={
            **SIZES,
            "image_size": 32,
            "patch_size": 4,
            "output_channels": 16,
            "mlp_dim": 32,
            "window_size": 4,
            "global_attn_indexes": [1],
            "num_pos_feats": 8,
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": 32, "patch_size": 4},
        mask_decoder_config={
            "hidden_size": 16,
            "mlp_dim": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "iou_head_hidden_dim": 16,
        },
    )
    config.prompt_encoder_config.image_embedding_size = 8
    model = transformers.SamModel(config).eval()
    points = torch.tensor([[[[8.0, 8.0]]]])
    pixels = picture(1, 3, 32, 32)
    return model, lambda: model(pixel_values=pixels, input_points=points).pred_masks


def whisper() -> tuple[Any, Run]:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        **{**BART, "vocab_size": 64, "num_mel_bins": 8, "max_source_positions": 10},
        max_target_positions=32,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    features = picture(1, 8, 20)
    return model, generating(model, input_features=features)


MODELS = [
    Foreign("ViT", seeing("vit"), encoded(2)),
    # SigLIP's pooling head is nn.MultiheadAttention, which calls no SDPA if it returns weights.
    Foreign("SigLIP", seeing("siglip_vision_model"), encoded(2), unseen={"MultiheadAttention": 1}),
    Foreign("CLIP", clip, encoded(2 + 2)),
    Foreign("Swin V2", seeing("swinv2", WINDOWS), NONE, unseen={"Swinv2SelfAttention": 2}),
    # Two encoder layers; the decoder has two self-attentions and five cross-attentions.
    Foreign("SAM", sam, encoded(2 + 2 * 3 + 1)),
    Foreign("LLaVA", llava, encoded(2) + generated(2)),
    # Without flash-attn, each picture has a separate call.
    Foreign("Qwen 2 VL", qwen2_vl, encoded(2 * 2) + generated(2)),
    Foreign("Whisper", whisper, encoded(2) + generated(4)),
]
