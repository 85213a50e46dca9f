"""Work of the host between two timed launches."""

import torch

from replay.timing.host_load import WIDTH, RestOfLayer


def test_rest_of_layer_computes_one_token_without_random_numbers() -> None:
    before = torch.get_rng_state()
    output = RestOfLayer(torch.device("cpu"))()
    assert output.shape == (1, 1, WIDTH)
    assert output.isfinite().all()
    assert not output.requires_grad
    assert torch.equal(torch.get_rng_state(), before)
