"""Answer key: the kernel that fails on each recording, the cause, and the place."""

import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Fault:
    """Planted fault."""

    cause: str
    function: str
    """Name of the kernel's function, in the file named after the cause."""
    recording: str
    layers: tuple[int, ...]
    """Numbers of the layers that fail; all others are healthy."""
    steps: tuple[int, ...] | None = None
    """Steps that fail; None if all steps fail."""
    head: int | None = None
    """Head that fails; None if several heads fail."""

    @property
    def kernel(self) -> str:
        """Name for `--kernels`: `PATH/file.py:function`."""
        return f"{HERE / self.cause.replace('-', '_')}.py:{self.function}"

    @property
    def causes(self) -> tuple[str, ...]:
        """Names by which the doctor may call the cause."""
        return OTHER_NAMES.get(self.cause, (self.cause,))

    @property
    def modules(self) -> frozenset[str]:
        """Names of the failing layers."""
        return frozenset(map(module, self.layers))


def module(layer: int) -> str:
    """Name of a recorded layer."""
    return f"blocks.{layer}.attn"


OTHER_NAMES = {"kv-heads": ("kv-heads", "head-mapping"), "racing": ("racing", "unknown")}
SAID_OF_RACING = re.compile("deterministic|same (call|inputs)")
"""Words that the sentence of a finding has if the doctor saw that equal calls differ."""

HEALTHY = ("plain", "in_float32", "online_softmax", "queries_in_chunks", "smoothed_int8")
"""Functions of `healthy.py`."""

FAULTS = (
    Fault("overflow", "scores_before_scaling", "large-scores", (3,), head=2),
    Fault("overflow", "softmax_without_maximum", "large-scores-late", (1,), (2,), head=2),
    Fault("overflow", "saturating_scores", "large-scores-float32", (2,), head=2),
    Fault("overflow", "partial_products_in_half", "cancelling-channels", (1,), head=1),
    Fault("overflow", "exponentials_in_half", "sharp-scores", (2,), head=3),
    Fault("overflow", "accumulator_in_half", "large-values", (1,), head=0),
    Fault("overflow", "values_cast_to_half", "massive-token", (2,), head=1),
    Fault("overflow", "key_mean_in_half", "key-offset", (0,), head=2),
    Fault("k-outlier-channel", "one_scale_per_tensor", "outlier", (2,)),
    Fault("k-outlier-channel", "one_scale_per_head", "outlier-head", (3,), head=1),
    Fault("k-outlier-channel", "one_scale_per_block", "outlier-bf16", (0,)),
    Fault("k-outlier-channel", "one_scale_per_token", "outlier", (2,)),
    Fault("k-outlier-channel", "fp8_with_one_scale", "outlier-late", (3,), (1, 2)),
    Fault("k-outlier-channel", "smoothed_over_channels", "outlier", (2,)),
    Fault("k-outlier-channel", "smoothed_over_heads", "outlier-head", (3,), head=1),
    Fault("k-outlier-channel", "clipped_at_a_percentile", "outlier-late", (3,), (1, 2)),
    Fault("mask-ignored", "never_passed_on", "bool-mask", (1,)),
    Fault("mask-ignored", "result_discarded", "bool-mask", (1,)),
    Fault("mask-ignored", "only_of_booleans", "float-mask", (2,)),
    Fault("mask-ignored", "only_of_full_shape", "padding-beside-full", (3,)),
    Fault("mask-ignored", "by_its_first_row", "first-row-unmasked", (1,)),
    Fault("mask-ignored", "not_of_cross_attention", "masked-cross-attention", (2,)),
    Fault("mask-ignored", "not_of_long_sequences", "masked-long", (3,)),
    Fault("mask-ignored", "not_of_grouped_heads", "masked-grouped", (1,)),
    Fault("mask-misread", "inverted", "bool-mask", (1,)),
    Fault("mask-misread", "boolean_added", "bool-mask", (1,)),
    Fault("mask-misread", "bias_as_boolean", "float-mask", (2,)),
    Fault("mask-misread", "transposed", "upper", (0,)),
    Fault("mask-misread", "padding_of_queries", "padding", (2,)),
    Fault("mask-misread", "shifted_by_one", "bool-mask", (1,)),
    Fault("mask-misread", "first_of_batch", "batched-masks", (2,)),
    Fault("mask-misread", "first_of_heads", "alibi", (3,)),
    Fault("mask-misread", "scaled_too", "relative-positions", (1,)),
    Fault("mask-misread", "in_base_two", "relative-positions", (1,)),
    Fault("mask-misread", "not_quite_masked", "bool-mask", (1,)),
    Fault("mask-misread", "first_columns_for_all_tiles", "masked-long", (3,)),
    Fault("mask-misread", "head_of_the_group", "alibi-grouped", (2,)),
    Fault("late-sink", "sum_not_rescaled_on_a_jump", "late-sink", (3,), head=2),
    Fault("late-sink", "values_not_rescaled_on_a_jump", "late-sink-late", (2,), (1,), head=0),
    Fault("late-sink", "factor_clamped", "late-sink", (3,), head=2),
    Fault("late-sink", "maximum_of_the_first_block", "late-sink-everywhere", (1,)),
    Fault("late-sink", "splits_merged_with_a_floor", "late-sink-late", (2,), (1,), head=0),
    Fault("late-sink", "rescaled_one_block_late", "late-sink", (3,), head=2),
    Fault("late-sink", "jump_scaled_twice", "late-sink-everywhere", (1,)),
    Fault("input-changed", "query_takes_the_scale", "own-scale", (2,)),
    Fault("input-changed", "scale_folded_into_key", "one-float32", (1,)),
    Fault("input-changed", "key_mean_subtracted", "one-contiguous", (3,)),
    Fault("input-changed", "padded_values_zeroed", "padding", (2,)),
    Fault("input-changed", "mask_inverted", "bool-mask", (1,)),
    Fault("input-changed", "bias_in_base_two", "alibi", (3,)),
    Fault("input-changed", "output_over_query", "one-long", (1,)),
    Fault("input-changed", "large_values_scaled", "large-values", (1,)),
    Fault("output-unwritten", "heads_in_fours", "five-heads", (2,), head=4),
    Fault("output-unwritten", "batches_in_twos", "three-batches", (3,)),
    Fault("output-unwritten", "first_head_of_a_group", "one-grouped", (2,)),
    Fault("output-unwritten", "as_wide_as_the_query", "wide-values", (0,)),
    Fault("output-unwritten", "tiles_beyond_the_grid", "one-long", (1,)),
    Fault("output-unwritten", "written_to_a_copy", "one-batched", (1,)),
    Fault("output-unwritten", "tiles_taken_for_padding", "window", (3,)),
    Fault("output-unwritten", "as_many_rows_as_keys", "more-queries", (2,)),
    Fault("odd-length", "padded_keys_counted", "odd-keys", (2,)),
    Fault("odd-length", "tail_keys_dropped", "odd-both", (3,)),
    Fault("odd-length", "tail_queries_dropped", "odd-queries", (1,)),
    Fault("odd-length", "last_tile_moved_back", "odd-keys", (2,)),
    Fault("odd-length", "bound_includes_one_more", "odd-keys", (2,)),
    Fault("odd-length", "equal_splits", "odd-keys", (2,)),
    Fault("odd-length", "last_tile_of_queries_misplaced", "odd-queries", (1,)),
    Fault("odd-length", "last_key_repeated", "one-more", (1,)),
    Fault("odd-length", "tail_mask_in_every_tile", "odd-both", (3,)),
    Fault("causal-alignment", "diagonal_at_the_last_key", "causal-prefix", (2,)),
    Fault("causal-alignment", "rows_of_a_buffer", "causal-prefix", (2,)),
    Fault("causal-alignment", "single_query_sees_all", "causal-decode", (3,)),
    Fault("causal-alignment", "keys_padded_in_front", "causal-more-queries", (1,)),
    Fault("causal-alignment", "positions_from_the_end", "causal-prefix", (2,)),
    Fault("causal-alignment", "few_queries_follow_a_cache", "causal-short-prefix", (1,)),
    Fault("causal-alignment", "top_left_in_any_case", "lower-right", (2,)),
    Fault("causal-alignment", "tiles_end_top_left", "lower-right", (2,)),
    Fault("stale-graph", "output_by_pointer", "one-bucket", (2,)),
    Fault("stale-graph", "output_by_shape", "one-bucket", (2,)),
    Fault("stale-graph", "text_keys_kept", "one-cross-attention", (1,)),
    Fault("stale-graph", "decoded_query_kept", "one-decode", (3,)),
    Fault("stale-graph", "copied_if_the_first_element_changed", "one-bucket", (2,)),
    Fault("stale-graph", "captured_after_two_calls", "one-bucket", (2,)),
    Fault("stale-graph", "first_mask_of_a_shape", "second-mask", (3,)),
    Fault("stale-graph", "first_scale_of_a_shape", "second-scale", (2,)),
    Fault("stale-graph", "value_kept_by_shape", "one-bucket", (2,)),
    Fault("strides", "value_taken_for_dense", "value-view", (2,)),
    Fault("strides", "expanded_heads_advance", "expanded-keys", (1,)),
    Fault("strides", "channels_taken_for_adjacent", "transposed-keys", (3,)),
    Fault("strides", "output_like_the_query", "query-view", (1,)),
    Fault("strides", "cache_taken_for_full", "static-cache", (2,)),
    Fault("layout", "library_default", "plain", (0, 1, 2)),
    Fault("layout", "output_viewed_as_heads", "head-dim-64", (1,)),
    Fault("layout", "viewed_instead_of_transposed", "one-long", (1,)),
    Fault("layout", "shorter_axis_taken_for_heads", "few-tokens", (2,)),
    Fault("layout", "pairs_packed_in_other_order", "text", (3,)),
    Fault("head-dim", "scale_of_the_padding", "stable-diffusion", (0, 1)),
    Fault("head-dim", "scores_of_128_channels", "stable-diffusion", (2,)),
    Fault("head-dim", "next_row_in_the_padding", "head-dim-72", (1,)),
    Fault("head-dim", "whole_blocks_of_columns", "head-dim-96", (2,)),
    Fault("head-dim", "channels_in_eights", "head-dim-36", (3,)),
    Fault("too-large", "grid_of_65535", "motion-module", (1,)),
    Fault("too-large", "key_numbers_in_16_bits", "long-cache", (2,)),
    Fault("too-large", "scales_of_64_blocks", "video", (1,)),
    Fault("too-large", "one_block_of_1024", "speech", (3,)),
    Fault("too-large", "mask_buffer_of_512", "long-prompt", (1,)),
    Fault("other-sequence", "end_included", "packed", (1,)),
    Fault("other-sequence", "keys_begin_where_queries_do", "packed-text", (2,)),
    Fault("other-sequence", "one_prompt_for_all", "guided-text", (1,)),
    Fault("other-sequence", "guidance_in_other_order", "one-batched", (1,)),
    Fault("other-sequence", "unpadded_without_a_first_zero", "padding", (2,)),
    Fault("kv-heads", "head_modulo", "one-grouped", (2,)),
    Fault("kv-heads", "group_of_a_power_of_two", "groups-of-seven", (1,)),
    Fault("kv-heads", "values_repeated_as_a_whole", "grouped-causal", (3,)),
    Fault("kv-heads", "rows_unfolded_in_other_order", "grouped-causal", (3,)),
    Fault("kv-heads", "folded_row_taken_for_position", "grouped-causal", (3,)),
    Fault("nonfinite-input", "plain", "nan-token", (2,), (1, 2)),
    Fault("nonfinite-input", "in_float32", "infinite-key", (1,), (2,)),
    Fault("nonfinite-input", "queries_in_chunks", "nan-mask", (3,)),
    Fault("nonfinite-input", "online_softmax", "nan-tail", (1,)),
    Fault("nonfinite-input", "zero_for_nan", "black-picture", (0, 1, 2, 3), (1, 2)),
    Fault("racing", "stored_before_the_last_tile", "one-long", (1,)),
    Fault("racing", "additions_lost", "one-long", (1,)),
    Fault("racing", "read_before_written", "one-long", (1,)),
    Fault("racing", "counter_not_reset", "one-long", (1,)),
    Fault("racing", "next_values_overwrite", "one-long", (1,)),
)
